"""Embeddings per layer: each layer reads a narrow vector of its own for every token.

Gemma 3n and Gemma 4: a second table, with a row of L * p numbers for each token id, and a
projection of the word embedding are summed; each layer multiplies its p numbers by a gate and
projects them to the residual stream.

Legend: s sequence, b micro-batch, h hidden, L layers, p width of a layer's vector, v padded
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer, device_of_parameters
from megatron.core.topology.group import Group
from megatron.core.transformer.alternating_updates import replicated_weight
from megatron.core.transformer.module import MegatronModule, in_compute_dtype
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


def layer_scalar(config: TransformerConfig) -> Tensor:
    """Return the initial factor [1] of the output of a layer."""
    return torch.ones(1, dtype=config.params_dtype, device=device_of_parameters(config))


class PerLayerEmbedding(MegatronModule):
    """The vectors of all layers, from token ids and from the input of the first layer.

    Args:
        vocab_size: v; the table is split over the tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        width = config.num_layers * config.per_layer_embed_dim
        assert config.embedding_init_method
        self.embeddings = VocabParallelEmbedding(
            vocab_size,
            width,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=pg_collection.tp,
        )
        self.projection = ReplicatedLinear(
            config.hidden_size,
            width,
            config=config,
            init_method=config.init_method,
            tp_group=pg_collection.tp,
        )
        self.norm: Any = WrappedTorchNorm(
            config, config.per_layer_embed_dim, config.layernorm_epsilon
        )

    def forward(self, input_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the vectors [s/cp, b, L, p] ([s/cp/tp, b, L, p] under sequence parallelism).

        Args:
            input_ids: [b, s/cp].
            hidden_states: input of the first layer, [s/cp, b, h] ([s/cp/tp, b, h]).
        """
        config = self.config
        shape = (*hidden_states.shape[:2], config.num_layers, config.per_layer_embed_dim)
        # Transposed ids give [s, b]; with a reduce-scatter the table transposes them itself.
        ids = input_ids if config.sequence_parallel else input_ids.t()
        if config.per_layer_vocab_size is not None:
            ids = torch.where(ids < config.per_layer_vocab_size, ids, 0)
        factor = torch.tensor(config.per_layer_embed_dim**0.5, dtype=config.params_dtype)
        of_tokens = self.embeddings(ids).view(shape) * factor
        projected, _ = self.projection(in_compute_dtype(hidden_states, config))
        of_states = self.norm((projected * config.hidden_size**-0.5).view(shape))
        vectors: Tensor = (of_states + of_tokens) * 2**-0.5
        return vectors


class PerLayerInput(MegatronModule):
    """The branch of a layer that adds the layer's vector to the residual stream.

    With AltUp the branch reads the active stream times a learned vector, and it is added to all
    streams but the first.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        sizes, tp = (config.hidden_size, config.per_layer_embed_dim), pg_collection.tp
        self.gate = ReplicatedLinear(
            *sizes, config=config, init_method=config.init_method, tp_group=tp
        )
        self.projection = ReplicatedLinear(
            *sizes[::-1], config=config, init_method=config.output_layer_init_method, tp_group=tp
        )
        self.norm: Any = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)
        if config.altup_num_inputs > 1:
            self.scale = ScaledInput(config, tp_group=tp)

    def forward(self, hidden_states: Tensor, vector: Tensor) -> Tensor:
        """Return hidden_states + norm(W (act(G hidden_states) * vector)), of the input's shape.

        Args:
            hidden_states: [s, b, h]; with AltUp n streams, [s, b, n*h].
            vector: [s, b, p], the layer's part of `PerLayerEmbedding`.
        """
        config, n = self.config, self.config.altup_num_inputs
        x = hidden_states
        if n > 1:
            x = self.scale(x.unflatten(-1, (n, -1))[..., config.altup_active_idx, :])
        gate, _ = self.gate(in_compute_dtype(x, config))
        projected, _ = self.projection(config.activation_func(gate) * vector)
        output: Tensor = self.norm(projected)
        if n > 1:
            output = F.pad(output.repeat(1, 1, n - 1), (config.hidden_size, 0))
        return hidden_states + output


class ScaledInput(ParallelLayer):
    """A learned factor for each channel."""

    def __init__(self, config: TransformerConfig, *, tp_group: Group) -> None:
        super().__init__(config, tp_group=tp_group)
        self.weight = replicated_weight(self, config.hidden_size, init_method=nn.init.ones_)

    def forward(self, x: Tensor) -> Tensor:
        """Return [s, b, h] times the factors."""
        return x * self.weight.to(x.dtype)
