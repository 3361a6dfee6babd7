"""All settings of a run in one value, and the table of all flags."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.model_settings import (
    EncoderSettings,
    ExpertSettings,
    LatentAttentionSettings,
    LoraSettings,
    ModelSettings,
    VisionSettings,
)
from megatron.core.settings.flags import FlagSpec, flag_specs
from megatron.core.settings.inert_flags import with_inert_fields
from megatron.training.config.batch import ScheduleSettings
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.config.data import DataSettings, TokenizerSettings
from megatron.training.config.logging import LaunchSettings, LoggingSettings
from megatron.training.config.optimizer import OptimizerSettings, PrecisionSettings
from megatron.training.config.parallelism import DataParallelSettings, ParallelismSettings


@dataclass(frozen=True, kw_only=True)
@with_inert_fields()
class InertSettings:
    """Flags of Megatron-LM that have no effect here, or are refused."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The given settings, one group per subject, without derived values.

    Field names are unique over all groups, so `get_args()` can join them in one namespace.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    latent_attention: LatentAttentionSettings = field(default_factory=LatentAttentionSettings)
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    encoders: EncoderSettings = field(default_factory=EncoderSettings)
    vision: VisionSettings = field(default_factory=VisionSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    parallelism: ParallelismSettings = field(default_factory=ParallelismSettings)
    ddp: DataParallelSettings = field(default_factory=DataParallelSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    inert: InertSettings = field(default_factory=InertSettings)

    @staticmethod
    def from_values(values: Mapping[str, object]) -> RunConfig:
        """Build a config from field names and values; other fields have their default."""
        table = all_flags()
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            spec = table[name]
            groups.setdefault(spec.group, {})[spec.field] = spec.to_field(value)
        return RunConfig(
            **{
                group.name: GROUP_CLASSES[group.name](**groups.get(group.name, {}))
                for group in dataclasses.fields(RunConfig)
            }
        )

    def value_of(self, name: str) -> Any:
        """Return the value of a flag in the form of the command line."""
        spec = all_flags()[name]
        return spec.to_arg(getattr(getattr(self, spec.group), spec.field))

    def flat(self) -> dict[str, Any]:
        """Return all fields of all groups as one dict, in the order of the flag table."""
        return {name: self.value_of(name) for name in all_flags()}

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        table = all_flags()
        return {n: v for n, v in self.flat().items() if v != table[n].default}


GROUP_CLASSES: dict[str, type] = {
    group.name: group.default_factory  # type: ignore[misc]
    for group in dataclasses.fields(RunConfig)
}
"""Attribute of `RunConfig` -> its dataclass."""


@functools.cache
def all_flags() -> dict[str, FlagSpec]:
    """Return field name -> flag, for all groups."""
    table: dict[str, FlagSpec] = {}
    for group, group_class in GROUP_CLASSES.items():
        for spec in flag_specs(group_class, group):
            assert spec.name not in table, f"two groups have a field {spec.name}"
            table[spec.name] = spec
    return table


@functools.cache
def flags_by_spelling() -> dict[str, FlagSpec]:
    """Return every spelling (`--hidden-size`) -> its flag."""
    table: dict[str, FlagSpec] = {}
    for spec in all_flags().values():
        for spelling in spec.spellings:
            assert spelling not in table, f"{spelling} belongs to two fields"
            table[spelling] = spec
    return table


@functools.cache
def opposites_by_spelling() -> dict[str, FlagSpec]:
    """Return every spelling that sets a switch to its default -> its flag."""
    table: dict[str, FlagSpec] = {}
    for spec in all_flags().values():
        for spelling in spec.opposites:
            assert spelling not in flags_by_spelling(), f"{spelling} is ambiguous"
            assert spelling not in table, f"{spelling} belongs to two fields"
            table[spelling] = spec
    return table


def plain(value: object) -> Any:
    """Return `value` as JSON-ready data: enums by name, tuples as lists."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
