"""Attention by flash-attention, by Transformer Engine, and by torch's compiled flex attention.

Written from the documented interfaces and **not run on a GPU**: the tests replace flash-attention 2
and Transformer Engine by substitutes with the same signatures, and run flex attention uncompiled.
(T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", arXiv
2307.08691. J. Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels", arXiv 2412.05496.)

flash-attention and Transformer Engine draw dropout inside their kernels, by position within the
heads and samples of this rank, so the mask depends on the layout. The seed follows from layer, draw
and first sample: the same layout has the same mask after a resume and in a recomputed layer.

Legend: s sequence, b micro batch, t = b*s tokens sample by sample, n query heads and g key/value
heads of this rank, d and e widths of key and value heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.optional_imports import has, require
from megatron.core.kernels.attention_options import AttentionOptions

KEPT_DOCUMENT_BORDERS = 4
"""One for each micro batch in flight."""
KEPT_MODULES = 64
"""Modules of Transformer Engine: one for each combination of sizes, windows and scales."""


def flash_attn(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend by flash-attention 2, also within a window and a document; scores may be capped.

    Args:
        query: [s, b, n, d]. key: [s, b, g, d]. value: [s, b, g, e]. options: see `AttentionKernel`.
    Returns:
        [s, b, n * e].
    """
    library = require("flash_attn", purpose="the attention kernel flash-attn")
    s, b, n, d = query.shape
    width, ids = value.shape[-1], options.mask.document_ids
    # The library supports one head width: pad narrow values with zeros and cut the result.
    value = value if width == d else F.pad(value, (0, d - width))
    # It accepts any strides except along the last dimension, which must be contiguous.
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    how: dict[str, Any] = {
        "dropout_p": options.dropout,
        "softmax_scale": options.scale,
        "causal": options.mask.window[1] == 0,
        "window_size": options.mask.window,
        "softcap": options.softcap or 0.0,
    }
    with options.seeded_dropout(query):
        if ids is None:
            out = library.flash_attn_func(q, k, v, **how)
        else:
            borders, longest = _document_borders(ids)
            out = library.flash_attn_varlen_func(
                *(x.reshape(b * s, -1, d) for x in (q, k, v)),
                borders,
                borders,
                longest,
                longest,
                **how,
            ).view(b, s, n, d)
    return out[..., :width].transpose(0, 1).reshape(s, b, n * width)


def transformer_engine(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend by the kernel that Transformer Engine chooses: cuDNN's or flash-attention's.

    Args:
        query: [s, b, n, d]. key: [s, b, g, d]. value: [s, b, g, e]. options: see `AttentionKernel`.
    Returns:
        [s, b, n * e].
    """
    s, b, n, d = query.shape
    ids, window = options.mask.document_ids, options.mask.window
    mask_type = "causal" if window[1] == 0 else "no_mask"
    if mask_type == "no_mask" and window != (-1, -1):  # bounded on both sides, or on none
        window = (s if window[0] < 0 else window[0], s if window[1] < 0 else window[1])
    module = _attention_module(
        (n, key.shape[2], d, value.shape[-1]), mask_type, window, options.scale, options.dropout
    )
    with options.seeded_dropout(query):
        if ids is None:
            return module(query, key, value, qkv_format="sbhd", attn_mask_type=mask_type)
        borders, longest = _document_borders(ids)
        out = module(
            *(x.transpose(0, 1).reshape(b * s, *x.shape[2:]) for x in (query, key, value)),
            qkv_format="thd",
            attn_mask_type="padding_causal" if mask_type == "causal" else "padding",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    return out.view(b, s, -1).transpose(0, 1).contiguous()


@functools.lru_cache(maxsize=KEPT_MODULES)
def _attention_module(
    sizes: tuple[int, int, int, int],
    mask_type: str,
    window: tuple[int, int],
    scale: float,
    dropout: float,
) -> Any:
    n, g, d, e = sizes
    # Pass this rank's heads and no tensor-parallel size: fewer groups than ranks would become 0.
    te = require("transformer_engine.pytorch", purpose="the attention kernel transformer-engine")
    return te.DotProductAttention(
        n,
        d if d == e else (d, e),
        num_gqa_groups=g,
        attention_dropout=dropout,
        attn_mask_type=mask_type,  # a window loses its right side under the default type
        window_size=window,
        softmax_scale=scale,
    )


@functools.lru_cache(maxsize=KEPT_DOCUMENT_BORDERS)
def _document_borders(document_ids: Tensor) -> tuple[Tensor, int]:
    """Return where the documents of ids [b, s] begin and end among t tokens, and the longest.

    int32 [documents + 1]; a sample ends a document. Waits for the device, once for all layers that
    share the ids: the cache compares ids by identity.
    """
    b, s = document_ids.shape
    begins = torch.ones(b, s, dtype=torch.bool, device=document_ids.device)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    borders = F.pad(begins.view(-1).nonzero().view(-1), (0, 1), value=b * s).to(torch.int32)
    return borders, int(borders.diff().max())


MASK_BLOCK = 128
"""Rows and columns of a block of torch's BlockMask, by its default."""
KEPT_BLOCK_MASKS = 4
"""One for each window and each micro batch in flight."""


def why_no_flex() -> str | None:
    """Return why flex attention cannot be compiled here, or None."""
    return None if has("triton") else "needs Triton, which is not installed"


def flex(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend within a window and a document; the scores may be bounded and have a sink.

    Args:
        query: [s, b, n, d]. key: [s, b, g, d]. value: [s, b, g, e]. options: see `AttentionKernel`.
    Returns:
        [s, b, n * e].
    """
    return flex_attention_with(_compiled(), query, key, value, options)


def flex_attention_with(
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return `flex` [s, b, n * e] by `attend`: torch's `flex_attention`, compiled or not."""
    s, b, n, _ = query.shape
    asks_lse = {} if options.sink is None else _asking_for_lse()
    found = attend(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        score_mod=_softcap(options.softcap),
        block_mask=_block_mask(options.mask.window, options.mask.document_ids, s, query.device),
        scale=options.scale,
        enable_gqa=n != key.shape[2],
        **asks_lse,
    )
    out = found
    if options.sink is not None:
        out, rest = found
        lse = getattr(rest, "lse", rest)
        # One more key of score `sink`: the others keep exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(lse - options.sink.float().view(1, n, 1))
        out = out * share.unsqueeze(-1).to(out.dtype)
    return out.permute(2, 0, 1, 3).reshape(s, b, -1)


def _asking_for_lse() -> dict[str, Any]:
    """Return the argument that makes torch also return the log of the softmax's denominator."""
    from torch.nn.attention import flex_attention

    newer = getattr(flex_attention, "AuxRequest", None)  # torch 2.9
    return {"return_lse": True} if newer is None else {"return_aux": newer(lse=True)}


def _softcap(bound: float | None) -> Callable[..., Tensor] | None:
    if bound is None:
        return None

    def bounded(score: Tensor, _b: Tensor, _h: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return bounded


@functools.lru_cache(maxsize=KEPT_BLOCK_MASKS)
def _block_mask(
    window: tuple[int, int], document_ids: Tensor | None, s: int, device: torch.device
) -> Any:
    """Return torch's BlockMask, once for all layers that share it; None if every key is visible.

    document_ids: [b, s], never falling along s. The cache compares them by identity.
    """
    left, right = window
    if left < 0 and right < 0 and document_ids is None:
        return None

    def is_seen(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= 0  # all of them
        if left >= 0:
            seen = seen & (key >= query - left)
        if right >= 0:
            seen = seen & (key <= query + right)
        if document_ids is not None:
            seen = seen & (document_ids[b, query] == document_ids[b, key])
        return seen

    batch = 1 if document_ids is None else document_ids.shape[0]
    return _block_mask_of_corners(is_seen, batch, s, device)


def _block_mask_of_corners(
    is_seen: Callable[..., Tensor], batch: int, s: int, device: torch.device
) -> Any:
    """Return the BlockMask of a mask [batch, 1, s, s] from the elements at its blocks' corners.

    A query sees one run of keys around it. So a block of the mask is not empty if its nearest
    (query, key) pair is visible, and full if both of its farthest pairs are visible. torch's
    `create_block_mask` computes all elements of the mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first = torch.arange(0, s, MASK_BLOCK, device=device)
    last = (first + MASK_BLOCK - 1).clamp(max=s - 1)
    begin, end, first_key, last_key = first[:, None], last[:, None], first[None], last[None]
    query = torch.maximum(begin, torch.minimum(first_key, end))
    key = torch.maximum(first_key, torch.minimum(query, last_key))
    sample = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    some, left, right = (
        is_seen(sample, sample, *pair).expand(batch, 1, len(first), len(first))
        for pair in ((query, key), (end, first_key), (begin, last_key))
    )
    whole = last - first == MASK_BLOCK - 1
    full = left & right & (whole[:, None] & whole)
    return BlockMask.from_kv_blocks(
        *_in_rows(some & ~full), *_in_rows(full), BLOCK_SIZE=MASK_BLOCK, mask_mod=is_seen,
        seq_lengths=(s, s),
    )  # fmt: skip


def _in_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of true columns of each row [.., rows], and columns, the true ones first.

    Args:
        table: bool, [.., rows, columns].
    """
    order = table.int().argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), order.int()


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
