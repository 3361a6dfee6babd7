"""Attention by flash-attention and by Transformer Engine.

Written from the documented interface of flash-attention 2 and Transformer Engine and **not run on a
GPU**: the tests let stand-ins with the same signatures compute. (T. Dao, "FlashAttention-2: Faster
Attention with Better Parallelism and Work Partitioning", arXiv 2307.08691.)

Both draw dropout inside their kernels, by position within the heads and samples of this rank, so
what is dropped depends on the layout. The generator is seeded by what the draw is for: the same
layout drops the same after a resume and when a layer is recomputed.

Legend: s sequence, b micro batch, t = b*s tokens sample by sample, n query heads and g key/value
heads of this rank, d and e widths of key and value heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.optional_imports import require
from megatron.core.kernels.attention_options import AttentionOptions

KEPT_DOCUMENT_BORDERS = 4
"""One for each micro batch whose layers are in the middle of their work."""
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
    # Its heads have one width: narrow values get columns of zeros, whose result is cut off.
    value = value if width == d else F.pad(value, (0, d - width))
    # It takes any strides but that of the last dimension.
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
    # The heads of this rank and no tensor-parallel size: fewer groups than ranks would become 0.
    return _transformer_engine().DotProductAttention(
        n,
        d if d == e else (d, e),
        num_gqa_groups=g,
        attention_dropout=dropout,
        attn_mask_type=mask_type,  # a window loses its right side under the default type
        window_size=window,
        softmax_scale=scale,
    )


def _transformer_engine() -> Any:
    return require("transformer_engine.pytorch", purpose="the attention kernel transformer-engine")


@functools.lru_cache(maxsize=KEPT_DOCUMENT_BORDERS)
def _document_borders(document_ids: Tensor) -> tuple[Tensor, int]:
    """Return where the documents of ids [b, s] begin and end among t tokens, and the longest.

    int32 [documents + 1]; a sample ends a document. Waits for the device, once for all layers that
    share the ids: the cache knows them by identity.
    """
    b, s = document_ids.shape
    begins = torch.ones(b, s, dtype=torch.bool, device=document_ids.device)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    borders = F.pad(begins.view(-1).nonzero().view(-1), (0, 1), value=b * s).to(torch.int32)
    return borders, int(borders.diff().max())
