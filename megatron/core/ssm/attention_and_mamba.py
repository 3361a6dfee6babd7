"""Attention and Mamba-2 side by side: both read one norm, and the layer adds both outputs.

J. Zuo et al., "Falcon-H1: A Family of Hybrid-Head Language Models", section 2, arXiv 2507.22448,
with its factors (section 3.2) on inputs, keys, parts of the projection of Mamba-2, and outputs.

Legend: s sequence, b micro batch, h hidden, n heads, g key/value groups, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.rotary import Rotary
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


@dataclass
class AttentionAndMambaSubmodules(SelfAttentionSubmodules):
    """Submodules of attention, and the spec of Mamba-2."""

    mamba: ModuleSpec | type | Any = None


def beside_mamba(attention: ModuleSpec, mamba: ModuleSpec) -> ModuleSpec:
    """Return the spec of self-attention and Mamba-2 side by side."""
    parts = AttentionAndMambaSubmodules(**vars(attention.submodules), mamba=mamba)
    return replace(attention, module=AttentionAndMamba, submodules=parts)


class AttentionAndMamba(SelfAttention):
    """Add the outputs of self-attention and of Mamba-2 for the same input.

    Communication: each of the two communicates as it does alone.
    """

    def __init__(
        self,
        config: Any,
        submodules: AttentionAndMambaSubmodules,
        layer_number: int,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, **options)
        self.mamba = build_module(
            submodules.mamba,
            config=config,
            layer_number=layer_number,
            pg_collection=self.pg_collection,
        )

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix [s, b, h] ([s/tp, b, h] under sequence parallelism); see `Attention.forward`."""
        first, _, last = self.config.factors_of_attention
        attended, bias = super().forward(hidden_states * first, attention_mask, **options)
        mixed, _ = self.mamba(hidden_states, **options)
        return attended * last + mixed, None if bias is None else bias * last

    def get_rotated_qkv(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        positions: Tensor | None,
        rotary_pos_emb: Rotary,
    ) -> tuple[Tensor, ...]:
        """Return the tensors of `SelfAttention`, with the factor on keys [s, b, g/tp, d]."""
        query, key, *others = super().get_rotated_qkv(
            hidden_states, key_value_states, positions, rotary_pos_emb
        )
        return query, key * self.config.factors_of_attention[1], *others
