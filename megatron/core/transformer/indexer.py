"""The indexer of sparse attention: it scores keys by cheap queries, one key head and weights.

(The "lightning indexer" of DeepSeek-V3.2; the paper is named in `kernels.sparse_attention`.)

It is replicated over tensor-parallel ranks. Under sequence parallelism a rank projects its own
tokens, and the results are gathered; without it all ranks compute the same. No gradient flows
from its inputs back into the model.

Legend: s sequence, b micro batch, h hidden, c width of the queries' latent, j heads, i width of a
head, r channels that rotate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.parallel_parameters import device_of_parameters
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.rotary import rotate
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class IndexerSubmodules:
    """Parts of an indexer."""

    linear_wq_b: ModuleSpec | type | Any = None
    linear_wk: ModuleSpec | type | Any = None
    k_norm: ModuleSpec | type | Any = None
    linear_weights_proj: ModuleSpec | type | Any = None


class Indexer(MegatronModule):
    """Projections to the queries, the key and the weights that score keys.

    Without an indexer loss its parameters are frozen.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        submodules: IndexerSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        assert config.dsa_indexer_n_heads and config.dsa_indexer_head_dim and config.q_lora_rank
        self.num_heads, self.head_dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim

        def linear(spec: object, rows: int, columns: int) -> Any:
            return build_module(
                spec,
                rows,
                columns,
                config=config,
                init_method=config.init_method,
                tp_group=pg_collection.tp,
            )

        width = self.num_heads * self.head_dim
        self.linear_wq_b = linear(submodules.linear_wq_b, config.q_lora_rank, width)
        self.linear_wk = linear(submodules.linear_wk, config.hidden_size, self.head_dim)
        epsilon = config.dsa_indexer_k_norm_epsilon
        self.k_norm = build_module(
            submodules.k_norm,
            self.head_dim,
            config.layernorm_epsilon if epsilon is None else epsilon,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            dtype=config.params_dtype,
            device=device_of_parameters(config),
        )
        self.linear_weights_proj = linear(
            submodules.linear_weights_proj, config.hidden_size, self.num_heads
        )
        if not config.trains_indexer:
            self.requires_grad_(False)

    def forward(
        self,
        hidden_states: Tensor,
        query_latent: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project, and rotate the first channels of queries and key.

        Args:
            hidden_states: [s, b, h], and query_latent: [s, b, c] ([s/tp, b, ...] under sequence
                parallelism).
            cos_sin: [s, 1 or b, 1, r] each; None in a layer that does not rotate.
        Returns:
            queries [s, b, j, i], weights [s, b, j] with all factors of the scores, key [s, b, i].
        Communication:
            under sequence parallelism three all-gathers over `tp`; backward keeps the gradient of
            the rank's own tokens, because the computation after the gather is replicated.
        """
        config = self.config
        hidden_states, query_latent = hidden_states.detach(), query_latent.detach()
        query, _ = self.linear_wq_b(query_latent)
        key, _ = self.linear_wk(hidden_states)
        if config.dsa_indexer_k_norm_fp32:
            key = key.to(torch.promote_types(key.dtype, torch.float32))
        key = self.k_norm(key)
        weights, _ = self.linear_weights_proj(hidden_states)
        if config.sequence_parallel:
            query, key, weights = (
                gather_from_sequence_parallel_region(x, False, group=self.pg_collection.tp)
                for x in (query, key, weights)
            )
        how = {
            "interleaved": config.dsa_indexer_rope_interleaved,
            "fuses": config.apply_rope_fusion,
        }
        query = query.unflatten(-1, (self.num_heads, self.head_dim))
        if cos_sin is not None:
            cos, sin = cos_sin
            query = rotate(query, cos, sin, **how)
            key = rotate(key.unsqueeze(2), cos, sin, **how).squeeze(2)
        return query, weights * (self.num_heads * self.head_dim) ** -0.5, key
