"""Configs that Megatron-Bridge writes and reads, and its wrapper of models."""

import functools
import os
import signal
from dataclasses import dataclass, field, fields

import pytest
import torch
import torch.nn.functional as F

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.yarn import yarn_softmax_scale
from megatron.training.config import (
    CheckpointConfig,
    SchedulerConfig,
    TrainingConfig,
    instantiate_utils,
)
from megatron.training.config.container import ConfigContainerBase
from megatron.training.config.instantiate_utils import (
    InstantiationException,
    InstantiationMode,
    TargetAllowlist,
    instantiate,
)
from megatron.training.config.utils import sanitize_dataclass_config
from megatron.training.models.dist_utils import _ddp_wrap

STRICT = InstantiationMode.STRICT
LAYERS = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def allow_this_module(monkeypatch):
    known = TargetAllowlist(*instantiate_utils.target_allowlist.allowed_prefixes)
    known.add_prefix("tests.")
    known.add_exact("collections.deque")
    monkeypatch.setattr(instantiate_utils, "target_allowlist", known)


def test_a_mapping_is_the_call_that_its_keys_describe():
    made = instantiate(
        {
            "deque": {"_target_": "collections.deque", "_args_": [[3, 4]], "maxlen": 2},
            "steps": [{"_target_": "torch.add", "_partial_": True, "alpha": 5}, 7],
            "dtype": {"_target_": "torch.bfloat16", "_call_": False},
            "plain": {"lr": 1e-3, "nothing": None},
        },
        added=1,
    )
    assert list(made["deque"]) == [3, 4]
    assert made["deque"].maxlen == 2
    assert made["steps"][0](torch.ones(1), torch.ones(1)).item() == 6
    assert (made["steps"][1], made["dtype"], made["added"]) == (7, torch.bfloat16, 1)
    assert made["plain"] == {"lr": 1e-3, "nothing": None}
    assert instantiate(None) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_target_": "os.system", "command": "false"}, "'os.system' is not a permitted target"),
        ({"a": [{"_target_": "megatronic.core.x"}]}, r"a\[0\]: 'megatronic.core.x' is not a perm"),
        ({"_target_": "torch.no_such_name"}, "torch.no_such_name"),
        ({"_target_": "torch.float32"}, "cannot be called"),
        ({"_target_": "torch.add", "_call_": False, "alpha": 1}, "is not called"),
        ({"_target_": "torch.zeros", "_args_": 3}, "_args_ is a list"),
        ({"_target_": "torch.zeros", "_args_": [-1]}, "zeros failed: RuntimeError"),
        ("torch.zeros", "a config is a mapping"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_built_names_the_target_and_its_place(config, words):
    with pytest.raises(InstantiationException, match=words):
        instantiate(config)


def test_unknown_keys_are_dropped_with_a_warning_or_refused(caplog):
    config = {"_target_": f"{SchedulerConfig.__module__}.SchedulerConfig", "lr_decay_iters": 3,
              "invented": 4}  # fmt: skip
    assert instantiate(config).lr_decay_iters == 3
    assert "does not take ['invented']: dropped" in caplog.text
    with pytest.raises(InstantiationException, match="invented"):
        instantiate(config, mode=STRICT)


def test_a_library_can_replace_the_check_of_targets(monkeypatch):
    monkeypatch.setattr(instantiate_utils, "_resolve_target", lambda *_, **__: dict)
    assert instantiate({"_target_": "anything", "a": 1}) == {"a": 1}


def test_the_allowlist_permits_whole_packages_and_exact_names():
    known = TargetAllowlist("torch.")
    assert known.is_allowed("torch.nn.Linear")
    assert not known.is_allowed("torchvision.ops")
    with pytest.raises(ValueError, match="with a dot at its end"):
        known.add_prefix("numpy")
    known.add_prefix("numpy.")
    known.add_exact("os.getcwd")
    assert known.is_allowed("numpy.load")
    assert known.is_allowed("os.getcwd")
    known.remove_prefix("numpy.")
    known.remove_exact("os.getcwd")
    assert not known.is_allowed("numpy.load")
    assert not known.is_allowed("os.getcwd")
    known.disable()
    assert known.is_allowed("os.system")
    known.enable()
    assert not known.is_allowed("os.system")


@dataclass(kw_only=True)
class _Inner:
    dtype: torch.dtype = torch.bfloat16
    activation: object = F.silu
    partial: object = field(default_factory=lambda: functools.partial(F.glu, dim=0))
    kind: ModelType = ModelType.encoder_or_decoder
    exit_signal: int = signal.SIGTERM
    derived: int = field(init=False, default=5)


@dataclass(kw_only=True)
class _Container(ConfigContainerBase):
    train: object = None
    inner: object = None
    sizes: list[int] = field(default_factory=list)
    _private: int = 0


def test_a_container_is_the_same_after_its_yaml_file(tmp_path, capsys):
    before = _Container(train=TrainingConfig(train_iters=3), inner=_Inner(), sizes=[1, 2])
    before.to_yaml(str(tmp_path / "config.yaml"))
    after = _Container.from_yaml(str(tmp_path / "config.yaml"), mode=STRICT)
    assert after.train == before.train
    assert after.sizes == before.sizes
    for name in ("dtype", "activation", "kind", "exit_signal", "derived"):
        assert getattr(after.inner, name) == getattr(before.inner, name), name
    assert (after.inner.partial.func, after.inner.partial.keywords) == (F.glu, {"dim": 0})
    before.print_yaml()
    assert "train_iters: 3" in capsys.readouterr().out


def test_a_container_refuses_keys_that_are_no_fields_in_strict_mode():
    written = _Container(sizes=[1]).to_dict()
    assert set(written) == {"_target_", "train", "inner", "sizes"}
    with pytest.raises(ValueError, match="invented"):
        _Container.from_dict(written | {"invented": 1})
    lenient = InstantiationMode.LENIENT
    assert _Container.from_dict(written | {"invented": 1}, mode=lenient).sizes == [1]


def test_computed_fields_of_older_files_are_dropped_at_every_level():
    target = f"{__name__}._Inner"
    config = {"list": [{"_target_": target, "derived": 9, "exit_signal": 2}], "derived": 1}
    assert sanitize_dataclass_config(config) == {
        "list": [{"_target_": target, "exit_signal": 2}], "derived": 1,
    }  # fmt: skip


def test_settings_can_be_derived_from_and_have_defaults_of_their_own(monkeypatch):
    @dataclass(kw_only=True)
    class Own(CheckpointConfig):
        extra: int = 1

    assert Own(save="here", extra=2).save == "here"
    assert Own().save_optim is True
    assert TrainingConfig().iterations_to_skip is not TrainingConfig().iterations_to_skip
    computed = [f.name for f in fields(SchedulerConfig) if not f.init]
    assert computed == ["lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps"]
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    from megatron.training.config import DistributedInitConfig

    assert DistributedInitConfig().local_rank == 3


def test_the_wrapper_of_other_shards_is_refused_with_its_replacement():
    groups, layer = ProcessGroupCollection.single(), torch.nn.Linear(2, 2)
    layer.config = TransformerConfig(**LAYERS)
    options = ([layer], True, DistributedDataParallelConfig(), False)
    (wrapped,) = _ddp_wrap(*options, pg_collection=groups)
    assert isinstance(wrapped, DistributedDataParallel)
    with pytest.raises(ConfigError, match="data-parallel-sharding-strategy"):
        _ddp_wrap(*options, use_megatron_fsdp=True, pg_collection=groups)


def test_yarn_of_a_decoder_is_read_under_megatrons_names():
    @dataclass
    class Theirs(TransformerConfig):
        yarn_rotary_scaling_factor: float | None = None
        yarn_original_max_position_embeddings: int | None = None
        yarn_beta_fast: float | None = None
        yarn_mscale: float | None = None
        yarn_mscale_all_dim: float | None = None

    config = Theirs(**LAYERS, yarn_rotary_scaling_factor=32.0, yarn_beta_fast=16.0)
    assert (config.rotary_scaling_factor, config.beta_fast, config.beta_slow) == (32.0, 16.0, 1)
    assert config.softmax_scale == yarn_softmax_scale(8, 32.0)
    both = Theirs(**LAYERS, yarn_rotary_scaling_factor=32.0, yarn_mscale=0.5, yarn_mscale_all_dim=1)
    assert both.softmax_scale == yarn_softmax_scale(8, 32.0, 0.5, 1)
    assert Theirs(**LAYERS).softmax_scale is None


def test_a_switch_that_is_none_has_its_default():
    assert DistributedDataParallelConfig(delay_wgrad_compute=None).delay_wgrad_compute is False
