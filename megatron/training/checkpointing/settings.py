"""The settings of checkpoints, taken from a run's flags or from Megatron's `args`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where and what to save and load; the fields are flags of the same name."""

    save: str | None = None
    load: str | None = None
    pretrained_checkpoint: str | None = None
    load_hf: str | None = None
    save_hf_dtype: str | None = None
    load_adapter: str | None = None
    save_retain_interval: int | None = None
    most_recent_k: int | None = None
    ckpt_step: int | None = None
    finetune: bool = False
    moe_use_upcycling: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    no_save_optim: bool = False
    no_save_rng: bool = False
    exit_on_missing_checkpoint: bool = False
    async_save: bool = False
    ckpt_fully_parallel_save: bool = True
    dist_ckpt_strictness: str = "assume_ok_unexpected"
    non_persistent_ckpt_type: str | None = None
    non_persistent_global_ckpt_dir: str | None = None
    non_persistent_local_ckpt_dir: str | None = None
    replication: bool = False
    replication_jump: int | None = None
    replication_factor: int = 2

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> CheckpointSettings:
        """Take the fields out of a run's settings by name; one that is absent keeps its default."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})
