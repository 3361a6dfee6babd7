"""Attention of one sequence to another: queries of the first, keys and values of the second.

A. Vaswani et al., "Attention Is All You Need", section 3.2.3, arXiv 1706.03762.

Legend: s length of the queries, c length of the keys, b micro-batch, h hidden, n query heads, g
key/value groups, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import divide


@dataclass
class CrossAttentionSubmodules:
    """Parts of a cross attention."""

    linear_q: ModuleSpec | type | Any = None
    linear_kv: ModuleSpec | type | Any = None
    core_attention: ModuleSpec | type | Any = None
    linear_proj: ModuleSpec | type | Any = None


class CrossAttention(Attention):
    """Attention to another sequence: one projection to queries, one to keys and values.

    Rows of `linear_kv` are packed by group: one key head, one value head.
    """

    def build_projections(self, submodules: CrossAttentionSubmodules) -> None:
        """Build `linear_q` and `linear_kv`."""
        config = self.config
        groups, head = config.num_query_groups, config.kv_channels
        assert groups and head
        self.hidden_size_per_attention_head = head
        self.num_query_groups_per_partition = divide(groups, self.pg_collection.tp.size())
        self.output_width = config.num_attention_heads * head
        options: dict[str, object] = {
            "gather_output": False,
            "bias": config.add_bias_linear or config.add_qkv_bias,
            "skip_bias_add": False,
            "is_expert": False,
        }
        hidden = config.hidden_size
        self.linear_q = self.linear(submodules.linear_q, hidden, self.output_width, **options)
        self.linear_kv = self.linear(submodules.linear_kv, hidden, 2 * groups * head, **options)
        weight = self.linear_kv.weight
        set_param_meta(weight, replace(get_param_meta(weight), fused_row_sizes=(head, head)))

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Project to this rank's heads.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
            key_value_states: [c, b, h] ([c/tp, b, h]).
        Returns:
            query [s, b, n/tp, d]; key and value [c, b, g/tp, d].
        """
        assert key_value_states is not None, "cross attention without a context"
        d, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        query, _ = self.linear_q(hidden_states)
        packed, _ = self.linear_kv(key_value_states)
        key, value = packed.view(*packed.shape[:2], groups, 2, d).unbind(3)
        return query.view(*query.shape[:2], -1, d), key, value
