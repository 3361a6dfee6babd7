"""Load a trained model in this layout, for inference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import flags_provider, settings_of
from megatron.core.tokenizers.hugging_face import ends_of_generation
from megatron.inference.forward import CachedModel, has_cache
from megatron.training.checkpointing import load_checkpoint
from megatron.training.config.resolved import ResolvedRun
from megatron.training.initialize import initialize_megatron
from megatron.training.setup.model import ModelProvider, build_model

DEFAULTS = {
    "no_load_optim": True,
    "no_load_rng": True,
    "micro_batch_size": 1,
    "skip_train": True,
    "eval_iters": 0,
    "mock_data": True,
}
"""Settings that training requires and inference does not use."""
FROM_CHECKPOINT = {"use_checkpoint_args": True, "exit_on_missing_checkpoint": True}
"""The checkpoint's arguments set the model's shape. (--load-hf always reads the shape.)"""
FROM_HUGGING_FACE = {"seq_length": 4096}
"""Such a model has no training length: use this, or the number of its positions if smaller."""


OptionsT = TypeVar("OptionsT")


@dataclass
class ModelSession(Generic[OptionsT]):
    """The settings, process groups, weights and tokenizer of a loaded model."""

    run: ResolvedRun
    groups: ProcessGroupCollection
    model: list[nn.Module]
    tokenizer: Any
    options: OptionsT
    """The tool's own flags."""

    @property
    def max_sequence_length(self) -> int:
        """The number of positions of the model."""
        return int(self.run.model.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """The model's number of classes; it may differ from the tokenizer's number of ids."""
        classes = self.run.model.unpadded_vocab_size
        assert classes is not None, "the start of a run derives it"
        return classes

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end a text, as the --load-hf directory names them, else the tokenizer's."""
        directory = self.run.checkpoint.load_hf
        stated = None if directory is None else ends_of_generation(directory)
        found: frozenset[int] = self.tokenizer.ends if stated is None else stated
        return found

    def with_cache(
        self, *, max_rows: int, max_length: int | None = None, packs_weights: bool = True
    ) -> CachedModel:
        """Return the model with a cache of keys and values; see `CachedModel`.

        Raises:
            ConfigError: the layout splits the sequence over ranks.
        """
        if not has_cache(self.model):
            raise ConfigError(
                "the layout splits the sequence over ranks.",
                rule="a cache of keys and values needs whole sequences on each rank",
                flags=["--sequence-parallel", "--context-parallel-size"],
                fix="leave them out: any layout loads any checkpoint",
            )
        return CachedModel(
            self.model,
            vocab_size=self.vocab_size,
            max_rows=max_rows,
            max_length=max_length or self.max_sequence_length,
            groups=self.groups,
            packs_weights=packs_weights,
        )


def defaults_beside(words: Sequence[str]) -> dict[str, Any]:
    """Return a tool's defaults; the words of its command line decide between the two sources."""
    flags = {word.split("=")[0] for word in words}
    is_checkpoint = "--load" in flags or "--load-hf" not in flags
    return {**DEFAULTS, **(FROM_CHECKPOINT if is_checkpoint else FROM_HUGGING_FACE)}


def open_session(
    provider: ModelProvider, flags: type[OptionsT], **defaults: object
) -> ModelSession[OptionsT]:
    """Read the command line, start the ranks, build the model and load its weights.

    Args:
        provider: builds a model chunk, as in training.
        flags: a dataclass of the tool's flags, in addition to the flags of training.
        defaults: of settings; the command line overrides them.
    Raises:
        ConfigError: on all ranks, with all problems of the settings; or no model is given.
    """
    session = initialize_megatron(
        extra_args_provider=flags_provider(flags),
        args_defaults={**defaults_beside(sys.argv[1:]), **defaults},
    )
    run = session.run
    options = settings_of(flags, run.extra)
    if run.checkpoint.load is None and run.checkpoint.load_hf is None:
        raise ConfigError(
            "there is no trained model.",
            rule="a tool loads a checkpoint or a Hugging Face model",
            flags=["--load", "--load-hf"],
            fix="--load DIRECTORY, the --save of the training run",
        )
    model = build_model(run, provider, session.groups, wrap_with_ddp=False)
    load_checkpoint(model, None, None)
    for chunk in model:
        chunk.eval()
    return ModelSession(run, session.groups, model, session.tokenizer, options)
