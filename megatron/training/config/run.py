"""All settings of a run in one value, and the table of all flags."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.training.config.adapters import AdapterConfig
from megatron.training.config.batch import ScheduleConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig, TokenizerConfig
from megatron.training.config.experts import ExpertConfig
from megatron.training.config.flag import FlagSpec, flag_specs
from megatron.training.config.logging import LaunchConfig, LoggingConfig
from megatron.training.config.model import LatentAttentionConfig, ModelConfig
from megatron.training.config.optimizer import OptimizationConfig
from megatron.training.config.parallelism import ParallelismConfig, ReplicationConfig
from megatron.training.config.precision import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that was asked for, one group per subject. Nothing in it is derived.

    Field names are unique over all groups, so `get_args()` can show them as one namespace.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    latent_attention: LatentAttentionConfig = field(default_factory=LatentAttentionConfig)
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> RunConfig:
        """Build from a flat mapping of field names; what is left out has its default."""
        table = all_flags()
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups.setdefault(table[name].group, {})[name] = value
        return RunConfig(
            **{
                group.name: GROUP_CLASSES[group.name](**groups.get(group.name, {}))
                for group in dataclasses.fields(RunConfig)
            }
        )

    def value_of(self, name: str) -> Any:
        """Return the value of one field by its name."""
        return getattr(getattr(self, all_flags()[name].group), name)

    def flat(self) -> dict[str, Any]:
        """Return all fields of all groups as one dict, in the order of the flag table."""
        return {name: self.value_of(name) for name in all_flags()}

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        table = all_flags()
        return {n: v for n, v in self.flat().items() if v != table[n].default}


GROUP_CLASSES: dict[str, type] = {
    "model": ModelConfig,
    "latent_attention": LatentAttentionConfig,
    "experts": ExpertConfig,
    "adapters": AdapterConfig,
    "parallelism": ParallelismConfig,
    "replication": ReplicationConfig,
    "schedule": ScheduleConfig,
    "optimization": OptimizationConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "launch": LaunchConfig,
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
            assert spelling not in flags_by_spelling(), f"{spelling} means two things"
            assert spelling not in table, f"{spelling} belongs to two fields"
            table[spelling] = spec
    return table


def plain(value: Any) -> Any:
    """Return `value` as JSON-ready data: enums by name, tuples as lists."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
