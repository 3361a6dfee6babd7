"""How several sequences lie back to back in one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class PackedSeqParams:
    """Descriptor of packed sequences for attention. Backends that take it say so.

    `cu_seqlens_*`: int32 [number of sequences + 1], running sums of the lengths.
    """

    qkv_format: str | None = None
    """"sbhd", "bshd" or "thd" (t: tokens of all sequences)."""
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    """Running sums with the padding behind each sequence counted in."""
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: Any = None
    total_tokens: int | None = None
    seq_idx: Tensor | None = None
    """int32 [1, t]: which sequence each token belongs to."""
    tokens_per_sample: Any = None
    pad_between_seqs: bool | None = None
    cp_scatter_cache: Any = None
