"""Queries that grow with their position, so that the softmax over many keys does not flatten.

K. M. Nakanishi, "Scalable-Softmax Is Superior for Attention", section 2, arXiv 2501.19399: each
head learns how fast its scores grow with the logarithm of the number of keys. With
`query_scale_beta` the factor is fixed, and grows after every interval of positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


class QueryScale(ParallelLayer):
    """Multiply queries by a factor of their position.

    Args:
        num_heads: heads of this rank with a rate and an offset of their own; 0 without them.
        is_split: tensor-parallel ranks have different heads; otherwise all heads, for all tokens.
        uses_beta: apply `query_scale_beta`.
    """

    config: TransformerConfig

    def __init__(
        self,
        num_heads: int,
        *,
        config: TransformerConfig,
        tp_group: Group,
        is_split: bool = True,
        uses_beta: bool = False,
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        self.uses_beta = uses_beta
        self.scale, self.bias = (
            self.new_parameter(num_heads, init_method=init, split_dim=0 if is_split else None)
            if num_heads
            else None
            for init in (None, nn.init.ones_)
        )

    def forward(self, query: Tensor, positions: Tensor) -> Tensor:
        """Scale queries [s, b, n, d] at positions [s, 1 or b], which count from 0."""
        config, positions = self.config, positions.float()
        if self.uses_beta:
            interval = config.query_scale_interval or config.original_max_position_embeddings
            passed = (positions + config.query_scale_without_rope).div(interval).floor()
            factor = (1 + config.query_scale_beta * torch.log1p(passed))[:, :, None, None]
            query = query * factor.to(query.dtype)
        if self.scale is not None and self.bias is not None:
            factor = positions.log1p().unsqueeze(-1) * self.scale.float() + self.bias.float()
            query = query * factor.unsqueeze(-1).to(query.dtype)
        return query


def query_scale(config: TransformerConfig, layer_number: int, tp: Group) -> QueryScale | None:
    """Return the scale of the queries of a layer; None if they have none."""
    heads = divide(config.num_attention_heads, tp.size()) if config.scalable_softmax else 0
    uses_beta = config.scales_queries(layer_number)
    if not (heads or uses_beta):
        return None
    return QueryScale(heads, config=config, tp_group=tp, uses_beta=uses_beta)
