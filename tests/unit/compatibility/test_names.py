"""What published code imports from Megatron can be imported here, and acts or says why not."""

import csv
import importlib
import logging
import subprocess
import sys
from collections import defaultdict

import pytest

from megatron.compatibility.import_hook import ALIASES, MISSING, STAR_MODULES, is_stand_in
from megatron.core.enums import ModelType
from megatron.core.foundation.errors import ConfigError
from megatron.training.setup.model import get_model
from tests.harness.pool import REPOSITORY

IMPORTED_NAMES = REPOSITORY / "tests/fixtures/compatibility/imported_names.csv"
"""Imports of projects that build on Megatron: module, name (none for `import module`), and in how
many files of theirs the import stands."""

FIRST_PRETRAIN_SCRIPTS = """
megatron.core: mpu
megatron.core.datasets.blended_megatron_dataset_builder: BlendedMegatronDatasetBuilder
megatron.core.datasets.gpt_dataset: GPTDataset GPTDatasetConfig MockGPTDataset
megatron.core.enums: ModelType
megatron.core.models.gpt: GPTModel
megatron.core.models.gpt.gpt_layer_specs: get_gpt_decoder_block_spec get_gpt_layer_local_spec
    get_gpt_layer_with_transformer_engine_spec get_gpt_mtp_block_spec
megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs: get_gpt_heterogeneous_layer_spec
megatron.core.rerun_state_machine: get_rerun_state_machine
megatron.core.transformer.spec_utils: import_module
megatron.core.utils: StragglerDetector
megatron.training: get_args get_timers get_tokenizer pretrain print_rank_0 inprocess_restart
megatron.training.arguments: core_transformer_config_from_args
megatron.training.datasets.sft_dataset: SFTDataset
megatron.training.utils: get_batch_on_this_cp_rank get_batch_on_this_tp_rank
    get_blend_and_blend_per_split
megatron.training.yaml_arguments: core_transformer_config_from_yaml
megatron.legacy.model: GPTModel
"""


def rows() -> list[tuple[str, str, int]]:
    with IMPORTED_NAMES.open() as file:
        return [(r["module"], r["name"], int(r["files"])) for r in csv.DictReader(file)]


def value_of(module: str, name: str) -> object:
    found = importlib.import_module(module)
    if not name:
        return found
    try:
        return getattr(found, name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


def test_every_imported_name_is_found_and_nine_of_ten_uses_act():
    files: dict[str, int] = defaultdict(int)
    missing = []
    for module, name, count in rows():
        try:
            value = value_of(module, name)
        except ImportError:
            missing.append(f"{module}.{name}")
        else:
            files["stands in" if is_stand_in(value) else "acts"] += count
    assert missing == []
    assert files["acts"] / (files["acts"] + files["stands in"]) > 0.95


def test_the_names_of_first_pretraining_scripts_are_found():
    for line in FIRST_PRETRAIN_SCRIPTS.replace("\n    ", " ").strip().splitlines():
        module, _, names = line.partition(":")
        for name in names.split():
            assert value_of(module, name) is not None, (module, name)


@pytest.mark.parametrize("module", sorted(ALIASES))
def test_every_name_of_the_table_is_defined_where_it_says(module):
    for name in ALIASES[module]:
        value = value_of(module, name)
        assert value is None or not is_stand_in(value)


@pytest.mark.parametrize("module", sorted(MISSING))
def test_a_name_without_a_definition_raises_when_it_is_used_and_not_when_it_is_imported(module):
    for name, reason in MISSING[module].items():
        lacking = value_of(module, name)
        derived = type("Own", (lacking,), {"__init__": lambda self: None})
        for use in (lacking, derived):
            with pytest.raises(ConfigError) as caught:
                use()
            assert f"{module}.{name} is not in this framework" in str(caught.value)
            assert reason in str(caught.value)
        with pytest.raises(AttributeError, match="is not in this framework"):
            lacking.anything  # noqa: B018  asking is the claim


def test_no_name_is_both_found_and_lacking():
    both = {m: set(ALIASES[m]) & set(MISSING[m]) for m in set(ALIASES) & set(MISSING)}
    assert not any(both.values())


def test_a_name_nobody_knows_is_still_an_import_error():
    for code in ("megatron.core.utils import nothing", "megatron.core.no_module import x",
                 "megatron.post_training.arguments import add_modelopt_args"):  # fmt: skip
        with pytest.raises(ImportError):
            exec(f"from {code}")


def test_a_library_in_a_folder_of_the_same_name_is_found_beside_this_one(tmp_path):
    library = tmp_path / "megatron" / "bridge"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("from megatron.core.enums import ModelType")
    (tmp_path / "megatron" / "other.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import megatron.bridge\n"
        "assert megatron.bridge.ModelType.__module__ == 'megatron.core.enums'\n"
        "try: import megatron.other\n"
        "except ModuleNotFoundError: print('alone')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.stdout == "alone\n", done.stderr


@pytest.mark.parametrize("module", STAR_MODULES)
def test_code_that_takes_all_names_of_a_module_finds_those_it_uses(module):
    found: dict[str, object] = {}
    exec(f"from {module} import *", found)
    assert ALIASES[module].keys() <= found.keys()


def test_an_encoder_and_decoder_in_one_model_is_refused():
    with pytest.raises(ConfigError, match="model_type=ModelType.encoder_and_decoder"):
        get_model(None, ModelType.encoder_and_decoder)


def test_names_cost_nothing_before_they_are_asked_for():
    code = (
        "import sys, megatron, megatron.core\n"
        "assert 'torch' not in sys.modules\n"
        "from megatron.core.energy_monitor import EnergyMonitor\n"
        "assert 'torch' not in sys.modules\n"
        "from megatron.core import mpu, __version__\n"
        "assert mpu is sys.modules['megatron.core.parallel_state']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_module_with_further_names_is_the_module_itself():
    from megatron.core import utils

    assert utils.__file__.endswith("megatron/core/utils.py")
    assert "def divide" in utils.__loader__.get_source("megatron.core.utils")
    logging.getLogger(__name__).debug("%s", utils.get_te_version())
