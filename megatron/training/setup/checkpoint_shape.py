"""The model's shape from a checkpoint, for --use-checkpoint-args."""

from __future__ import annotations

from megatron.training.checkpointing import stored_args
from megatron.training.checkpointing.megatron_functions import MODEL_SHAPE_ARGS
from megatron.training.config.run import RunConfig, all_flags


def with_checkpoint_shape(config: RunConfig) -> RunConfig:
    """With --use-checkpoint-args, return the settings with the checkpoint's model in them."""
    if not config.checkpoint.use_checkpoint_args:
        return config
    saved = config.checkpoint
    stored = stored_args(saved.load, saved.ckpt_step, save=saved.save)
    if stored is None:
        return config
    # Padding depends on the layout and is derived anew.
    names = [n for n in MODEL_SHAPE_ARGS if n in all_flags() and n != "padded_vocab_size"]
    taken = {name: getattr(stored, name) for name in names if hasattr(stored, name)}
    return RunConfig.from_values({**config.flat(), **taken})
