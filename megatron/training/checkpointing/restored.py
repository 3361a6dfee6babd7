"""What a checkpoint gives back, and giving it to the parts of the run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.loader import Contents, Loaded
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.training.checkpointing.run_state import (
    RunParts,
    apply_model,
    apply_optimizer,
    apply_rng,
    train_state_of,
)
from megatron.training.state import TrainState


@dataclass
class Restored:
    """What a checkpoint gave back, besides what it put into the parts."""

    path: StoragePath
    train_state: TrainState
    args: Mapping[str, Any]
    """Settings of the run that saved it."""
    extra: dict[str, Any]
    """What was passed to `save` as extra."""
    layout: Mapping[str, Any] = field(default_factory=dict)


def take_over(
    parts: RunParts,
    contents: Contents,
    loaded: Loaded,
    *,
    with_optimizer: bool,
    with_rng: bool,
    is_finetuning: bool,
) -> Restored:
    """Give the loaded state to the parts: this rank alone."""
    state = loaded.state
    apply_model(parts, state, strict=not loaded.unexpected)
    apply_optimizer(parts, state, was_loaded=with_optimizer)
    if with_rng:
        apply_rng(state)
    layout, args, extra = (
        contents.manifest.info.get("layout"),
        state.get("args"),
        state.get("extra"),
    )
    return Restored(
        contents.directory,
        TrainState() if is_finetuning else train_state_of(state),
        vars(args) if isinstance(args, Namespace) else {},
        extra if isinstance(extra, dict) and not is_finetuning else {},
        layout if isinstance(layout, dict) else {},
    )
