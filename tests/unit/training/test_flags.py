"""Every flag of Megatron is known here, with its type and default."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.settings.flags import flag_specs
from megatron.training.checkpointing.stored_settings import MODEL_SHAPE_ARGS
from megatron.training.cli.flags_document import flags_document
from megatron.training.cli.parser import build_parser, parse_command_line
from megatron.training.config.run import GROUP_CLASSES, all_flags, flags_by_spelling, plain

MEGATRON = json.loads((Path(__file__).parent / "megatron_flags.json").read_text())["flags"]
OUR_OWN_CHOICES = {"ByteTokenizer"}
DERIVED_DEFAULTS = {
    # Megatron's default acts only with --use-megatron-fsdp; here the flag acts by itself.
    "--data-parallel-sharding-strategy",
}


@pytest.mark.parametrize("expected", MEGATRON, ids=[row["flag"] for row in MEGATRON])
def test_a_flag_of_megatron_has_its_type_and_default(expected):
    spec = flags_by_spelling()[expected["flag"]]
    kind, _, choices = spec.type_text().partition(": ")
    kept = [choice for choice in choices.split("/") if choice not in OUR_OWN_CHOICES]
    assert kind + (": " + "/".join(kept) if choices else "") == expected["type"]
    derived = expected["flag"] in DERIVED_DEFAULTS
    assert plain(spec.default) == (None if derived else expected["default"])


def test_every_field_is_documented():
    undocumented = [spec.name for spec in all_flags().values() if not spec.help]
    assert not undocumented


def test_the_command_line_is_frozen():
    """A flag that changes or goes breaks launch scripts: this list is changed on purpose only."""
    frozen = json.loads((Path(__file__).parent / "frozen_flags.json").read_text())
    current = {
        spec.flag: {
            "name": spec.name,
            "type": spec.type_text(),
            "default": plain(spec.default),
            "spellings": list(spec.spellings),
        }
        for spec in all_flags().values()
    }
    assert current == frozen


def test_what_a_flag_is_part_of_exists():
    table = all_flags()
    for spec in table.values():
        assert not spec.metadata.part_of or spec.metadata.part_of in table, spec.name


def test_values_that_are_refused_are_choices():
    for spec in all_flags().values():
        assert set(spec.metadata.refuse_values) <= set(spec.choices), spec.name


@pytest.mark.parametrize("group", GROUP_CLASSES)
def test_defaults_build_a_group(group):
    built = GROUP_CLASSES[group]()
    for spec in flag_specs(GROUP_CLASSES[group], group):
        assert getattr(built, spec.field) == spec.to_field(spec.default)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("--disable-bias-linear", "add_bias_linear"),
        ("--no-bias-linear", "add_bias_linear"),
        ("--no-add-bias-linear", "add_bias_linear"),
        ("--no-rope-fusion", "apply_rope_fusion"),
        ("--disable-rope-fusion", "apply_rope_fusion"),
        ("--no-mmap-bin-files", "mmap_bin_files"),
    ],
)
def test_an_off_switch_has_two_prefixes(spelling, name):
    config = parse_command_line([spelling]).config
    assert config.value_of(name) is False


def test_flags_are_not_abbreviated():
    with pytest.raises(ConfigError, match="unknown flag --hidden-siz.\n"):
        parse_command_line(["--hidden-siz", "64"])


def test_help_of_all_flags_can_be_formatted():
    assert "--num-layers" in build_parser(prog="pretrain_gpt.py").format_help()


def test_the_document_of_flags_is_current():
    written = (Path(__file__).parents[3] / "docs" / "flags.md").read_text()
    assert written == flags_document(), "python -m megatron.training.cli.flags_document"


def test_every_flag_that_acts_is_read_somewhere():
    """A flag that is declared and never read would be ignored without a word."""
    root = Path(__file__).parents[3]
    sources = [root / "pretrain_gpt.py", *(root / "megatron").rglob("*.py")]
    config = root / "megatron" / "training" / "config"
    declarations = {
        config / f"{group.__module__.rpartition('.')[2]}.py" for group in GROUP_CLASSES.values()
    }
    declarations |= {config / "run.py", config / "resolved.py"}
    text = "\n".join(source.read_text() for source in sources if source not in declarations)
    # The declaration of a field and its place in a list of names read nothing.
    text = re.sub(r"^    \w+: [^=]+ = [^(]+$", "", text, flags=re.MULTILINE)
    text = text.replace(str(MODEL_SHAPE_ARGS), "")
    table = all_flags()
    ignored = []
    for spec in table.values():
        owner = table[spec.metadata.part_of] if spec.metadata.part_of else spec
        left = [choice for choice in spec.choices if choice not in spec.metadata.refuse_values]
        told = any((f.refuse or f.note) for f in (spec.metadata, owner.metadata))
        told = told or left == [spec.default] or spec.metadata.part_of == "cuda_graph_impl"
        names = {spec.name, spec.field}
        uses = [rf"\.{name}\b|[\"']{name}[\"']|\b{name}=" for name in names]
        if not told and not re.search("|".join(uses), text):
            ignored.append(spec.flag)
    assert ignored == []
