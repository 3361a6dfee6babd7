"""Heads that replace the output layer over the vocabulary: rewards, values and embeddings.

Legend: s sequence, b micro batch, h hidden, n outputs.
"""

from __future__ import annotations

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.transformer_config import TransformerConfig

Model = TypeVar("Model", bound=LanguageModule)


class IdentityHead(MegatronModule):
    """Return the last hidden states: the vectors of an embedding model."""

    weight: Tensor | None = None
    """Always None; an output layer over the vocabulary has a weight."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.config: TransformerConfig = config
        self.tp_group = pg_collection.tp

    def forward(self, hidden_states: Tensor, **_options: object) -> tuple[Tensor, None]:
        """Return ([s/cp, b, h], no bias) of [s/cp, b, h] ([s/cp/tp, b, h] with sequence
        parallelism).

        Communication:
            with sequence parallelism an all-gather on tp; none in backward.
        """
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden_states, None


class LinearHead(IdentityHead):
    """A linear layer without bias, replicated over tp; a reward model has one output."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        num_outputs: int = 1,
    ) -> None:
        super().__init__(config, pg_collection)
        self.score = ReplicatedLinear(
            config.hidden_size,
            num_outputs,
            config=config,
            init_method=config.init_method,
            tp_group=pg_collection.tp,
        )

    def forward(self, hidden_states: Tensor, **_options: object) -> tuple[Tensor, None]:
        """Return ([s/cp, b, n], no bias); see `IdentityHead.forward`."""
        weight = self.score.weight
        return super().forward(F.linear(hidden_states.to(weight.dtype), weight))


def replace_head(model: Model, num_outputs: int | None = 1) -> Model:
    """Replace the head of a new model (on the last stage) and return the model.

    Call this in the model's provider, before weights are loaded. The model then returns the head's
    outputs [b, s/cp, n] instead of logits. All heads of a BERT are removed.

    Args:
        num_outputs: number of outputs of a `LinearHead`; None uses an `IdentityHead`.
    Raises:
        ConfigError: the head is tied to the word embedding.
    """
    if model.share_embeddings_and_output_weights:
        raise ConfigError(
            "the head to be replaced is tied to the word embedding.",
            rule="only an untied head can be replaced",
            flags=["--untie-embeddings-and-output-weights"],
            fix="build the model with --untie-embeddings-and-output-weights",
        )
    if not model.post_process:
        return model
    groups = model.pg_collection
    head: nn.Module
    if num_outputs is None:
        head = IdentityHead(model.config, groups)
    else:
        head = LinearHead(model.config, groups, num_outputs=num_outputs)
    model.output_layer = head
    for name in ("lm_head", "pooler", "binary_head"):
        if hasattr(model, name):
            delattr(model, name)
    if model.config.perform_initialization:
        model.initialize()
    return model
