"""Checkpoints of a run: weights, optimizer, schedule, random state and counters."""

from megatron.training.checkpointing.checkpointer import Checkpointer
from megatron.training.checkpointing.megatron_functions import (
    load_args_from_checkpoint,
    load_checkpoint,
    maybe_finalize_async_save,
    save_checkpoint,
)
from megatron.training.checkpointing.restore import Restored
from megatron.training.checkpointing.run_state import CheckpointContext
from megatron.training.checkpointing.stored_settings import stored_args
from megatron.training.config.checkpoint import CheckpointSettings

__all__ = [
    "CheckpointContext",
    "CheckpointSettings",
    "Checkpointer",
    "Restored",
    "load_args_from_checkpoint",
    "load_checkpoint",
    "maybe_finalize_async_save",
    "save_checkpoint",
    "stored_args",
]
