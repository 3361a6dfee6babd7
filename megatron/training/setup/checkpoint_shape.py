"""The model's shape from a checkpoint, for --use-checkpoint-args."""

from __future__ import annotations

from collections.abc import Collection

from megatron.training.checkpointing import stored_args
from megatron.training.checkpointing.megatron_functions import MODEL_SHAPE_ARGS, TOKENIZER_FILES
from megatron.training.config.run import RunConfig, all_flags


def with_checkpoint_shape(config: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """With --use-checkpoint-args, return the settings with the checkpoint's model in them.

    Args:
        given: fields that the user set, which stay as they are. With a field of the tokenizer in
            it, none is taken.
    """
    if not config.checkpoint.use_checkpoint_args:
        return config
    saved = config.checkpoint
    stored = stored_args(saved.load, saved.ckpt_step, save=saved.save)
    if stored is None:
        return config
    # Padding depends on the layout and is derived anew.
    left_out = {"padded_vocab_size", *given}
    if not saved.use_tokenizer_model_from_checkpoint_args:
        # Files that a checkpoint names may be anybody's: they are opened on request only.
        left_out |= TOKENIZER_FILES
    if "tokenizer_type" in given or TOKENIZER_FILES & set(given):
        left_out |= {"tokenizer_type", "vocab_size", *TOKENIZER_FILES}
    names = [n for n in MODEL_SHAPE_ARGS if n in all_flags() and n not in left_out]
    taken = {name: getattr(stored, name) for name in names if hasattr(stored, name)}
    return RunConfig.from_values({**config.flat(), **taken})
