"""Values of other types than their fields' get no further than the construction of a config."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import pkgutil
import types
import typing
from importlib import import_module

import numpy as np
import pytest
import torch

import megatron.core
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.fim_dataset import GPTFIMDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.images.vision_text_dataset import VisionTextConfig
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDatasetConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.vision.vision_config import VisionConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.settings.inert_flags import inert_fields
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.low_rank_adapter import LoraConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.inference.sampling import Sampling

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
CONFIGS = (
    *(TransformerConfig, MLATransformerConfig, ModelParallelConfig, OptimizerConfig),
    *(DistributedDataParallelConfig, VisionConfig, LoraConfig, Sampling),
    *(GPTDatasetConfig, GPTFIMDatasetConfig, BERTMaskedWordPieceDatasetConfig),
    *(T5MaskedWordPieceDatasetConfig, VisionTextConfig),
)


class Wrong:
    """A value of no field."""


def wrong_values(hint):
    """Return values that do not fit an annotation; none of a field that takes anything."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return []
    if origin in (typing.Union, types.UnionType):
        of_all = [wrong_values(option) for option in inner]
        shared = [v for v in of_all[0] if all(any(v is w for w in other) for other in of_all)]
        return shared if all(of_all) else []
    of_kind = {
        bool: [WRONG, TEXT, NUMBER, FRACTION, LIST],
        int: [WRONG, TEXT, FRACTION, TRUTH, LIST],
        float: [WRONG, TEXT, TRUTH, LIST],
        str: [WRONG, NUMBER, FRACTION, TRUTH, LIST],
        type(None): [WRONG, TEXT, NUMBER, FRACTION, TRUTH, LIST],
    }
    if hint in of_kind:
        return of_kind[hint]
    if origin in (list, tuple, collections.abc.Sequence) or hint in (list, tuple):
        return [WRONG, TEXT, NUMBER, FRACTION, TRUTH, *([LIST] if inner else [])]
    return [WRONG, TEXT, NUMBER, FRACTION, TRUTH, LIST]  # an enum, a dtype, a function, a mapping


WRONG, TEXT, NUMBER, FRACTION, TRUTH, LIST = Wrong(), "no such value", 7, 2.5, True, [Wrong()]


def required(kind):
    """Return arguments without which a config cannot be built: fitting ones."""
    fitting = {int: 8, str: "x", float: 0.5, bool: True}
    hints = typing.get_type_hints(kind)
    return {
        field.name: SHAPE.get(field.name, fitting.get(hints[field.name]))
        for field in dataclasses.fields(kind)
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    } | (SHAPE if issubclass(kind, TransformerConfig) else {})


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_field_takes_a_value_of_another_type(kind):
    unread = {row.name for row in inert_fields(kind)}
    hints, num_tried = typing.get_type_hints(kind), 0
    for field in dataclasses.fields(kind):
        if not field.init or (field.name in unread and hints[field.name] not in (bool, int)):
            continue
        for value in wrong_values(hints[field.name]):
            with pytest.raises(ConfigError) as caught:
                kind(**required(kind) | {field.name: value})
            assert f"{field.name}=" in str(caught.value), (field.name, value)
            assert f"is of type {type(value).__name__}" in str(caught.value)
            num_tried += 1
    assert num_tried >= 4 * len(dataclasses.fields(kind)) / 2


def test_every_dataclass_of_the_core_that_is_called_a_config_is_tried():
    found = set()
    for module in pkgutil.walk_packages(megatron.core.__path__, "megatron.core."):
        if "triton" not in module.name and not module.name.endswith("_template_sandbox"):
            found |= {
                value
                for name, value in vars(import_module(module.name)).items()
                if dataclasses.is_dataclass(value) and name.endswith("Config")
            }
    parts = {base for kind in CONFIGS for base in kind.__mro__}
    assert found <= parts, found - parts


@pytest.mark.parametrize("member", AttnBackend)
def test_an_enum_is_taken_by_its_name(member):
    for given in (member, member.name):
        assert TransformerConfig(**SHAPE, attention_backend=given).attention_backend is member
    assert TransformerConfig(**SHAPE, attention_backend=None).attention_backend is AttnBackend.auto


def test_the_error_names_the_field_the_value_and_what_is_accepted():
    class Foreign(enum.Enum):
        flash = 1

    for given in ("flsh", 3, Foreign.flash):
        with pytest.raises(ConfigError) as caught:
            TransformerConfig(**SHAPE, attention_backend=given)
        (problem,) = caught.value.problems
        assert problem.found.startswith("attention_backend=")
        assert "flash, fused, unfused, local, auto" in problem.rule


def test_all_wrong_fields_are_named_together():
    with pytest.raises(ConfigError, match=r"hidden_dropout='0\.1'") as caught:
        TransformerConfig(**SHAPE, hidden_dropout="0.1", params_dtype="bf16")
    assert len(caught.value.problems) == 2


def test_numbers_of_numpy_and_sequences_become_those_of_the_annotation():
    config = TransformerConfig(
        num_layers=np.int64(2), hidden_size=8, num_attention_heads=2, window_size=[4, 0],
        hidden_dropout=np.float32(0.5), attention_dropout=0, recompute_modules=("mlp",),
        recompute_granularity="selective",
    )  # fmt: skip
    assert type(config.num_layers) is int and type(config.hidden_dropout) is float
    assert config.window_size == (4, 0) and config.recompute_modules == ["mlp"]


def test_fields_of_classes_elsewhere_are_left_alone():
    @dataclasses.dataclass
    class Provider(TransformerConfig):
        layer_spec: typing.Callable[[NotHere], object] | None = None  # noqa: F821
        bf16: bool = True
        params_dtype: torch.dtype = torch.bfloat16

    assert Provider(**SHAPE, layer_spec="anything").layer_spec == "anything"
    with pytest.raises(ConfigError, match="bf16='yes'"):
        Provider(**SHAPE, bf16="yes")
