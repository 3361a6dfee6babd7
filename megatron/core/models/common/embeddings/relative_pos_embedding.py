"""A bias of attention scores by the distance between query and key.

C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 2.1, arXiv 1910.10683: each head has one bias per bucket of distances. Short
distances have one bucket each; the buckets of longer distances grow.

Legend: q queries, k keys, n heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.parallel_parameters import empty_parameter
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


class RelativePositionEmbedding(MegatronModule):
    """The bias table of one stack of layers; all its layers share the table.

    Every pipeline stage has a copy, and each tensor-parallel rank has the columns of its heads.

    Args:
        bidirectional: keys before and after the query have separate buckets; otherwise all keys
            after the query, which are masked, share the bucket of distance 0.
        num_buckets: buckets per head.
        max_distance: this and all longer distances share the last bucket.
        name_of_original: name of the original table's module if this is a copy, otherwise None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        bidirectional: bool,
        num_buckets: int = 32,
        max_distance: int = 128,
        name_of_original: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        tp = resolve_groups(pg_collection).tp
        self.bidirectional = bidirectional
        self.num_buckets, self.max_distance = num_buckets, max_distance
        heads = divide(config.num_attention_heads, tp.size())
        weight = empty_parameter(config, num_buckets, heads)
        self.relative_attention_bias = nn.Embedding(num_buckets, heads, _weight=weight)
        original = None
        if name_of_original is not None:
            original = f"{name_of_original}.relative_attention_bias.weight"
        meta = ParamMeta(
            split_dim=1,
            split_axis="tp",
            init_method=config.init_method,
            tied_to=original,
            is_on_all_stages=True,
        )
        set_param_meta(self.relative_attention_bias.weight, meta)

    def forward(self, num_queries: int, num_keys: int) -> Tensor:
        """Return the bias of this rank's heads, [1, n/tp, q, k]."""
        buckets = relative_position_buckets(
            num_queries,
            num_keys,
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            device=self.relative_attention_bias.weight.device,
        )
        by_pair = self.relative_attention_bias(buckets)
        return by_pair.permute(2, 0, 1).unsqueeze(0)


def relative_position_buckets(
    num_queries: int,
    num_keys: int,
    *,
    bidirectional: bool,
    num_buckets: int,
    max_distance: int,
    device: torch.device | None = None,
) -> Tensor:
    """Return the bucket of each pair, int64 [q, k].

    Half of the buckets have one distance each; the others grow with the logarithm of the distance.
    """
    queries = torch.arange(num_queries, device=device)
    ahead = torch.arange(num_keys, device=device) - queries.unsqueeze(1)
    if bidirectional:
        num_buckets //= 2
        first, distance = (ahead > 0).long() * num_buckets, ahead.abs()
    else:
        first, distance = torch.zeros_like(ahead), (-ahead).clamp(min=0)
    num_exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / num_exact)
    growth = growth / math.log(max_distance / num_exact) * (num_buckets - num_exact)
    wide = (num_exact + growth.long()).clamp(max=num_buckets - 1)
    return first + torch.where(distance < num_exact, distance, wide)
