"""Scale, mask and softmax of attention scores, for attention that materialises its scores.

Shapes: `b` micro batch, `n` heads of this rank, `q`/`k` query and key positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.vocab_softmax import row_blocks

MASKED_SCORE = -10000.0
"""Value of masked scores: finite, so a query without a visible key has uniform probabilities."""


@functools.lru_cache(maxsize=4)
def causal_mask(
    num_queries: int, num_keys: int, window: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Return bool [q, k], True for keys that are hidden from a query.

    The last query has the position of the last key. `window` is the number of visible keys to the
    left and right of a query, -1 for no limit; a causal mask hides all keys to the right.
    """
    query = torch.arange(num_queries, device=device).unsqueeze(1) + (num_keys - num_queries)
    key = torch.arange(num_keys, device=device).unsqueeze(0)
    hidden = key > query
    if window is not None and window[0] >= 0:
        hidden |= key < query - window[0]
    return hidden


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None, scale: float, *, in_fp32: bool = True
) -> Tensor:
    """Return softmax(scale * scores) over the last dimension, masked scores excluded.

    It allocates and saves one tensor, the probabilities; fp32 exists only for a block of queries at
    a time.

    Args:
        scores: [b, n, q, k].
        mask: bool, True is masked, broadcastable to the scores; None masks nothing.
        in_fp32: compute half-precision scores in fp32.
    """
    return _ScaledMaskedSoftmax.apply(scores, mask, scale, in_fp32)


class _ScaledMaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, in_fp32: bool
    ) -> Tensor:
        probabilities = torch.empty_like(scores, memory_format=torch.contiguous_format)
        dtype = torch.float32 if in_fp32 and scores.element_size() < 4 else scores.dtype
        hidden = None if mask is None else mask.expand(scores.shape)
        for view in _blocks(scores):
            block = scores[view].to(dtype, copy=True).mul_(scale)
            if hidden is not None:
                block.masked_fill_(hidden[view], MASKED_SCORE)
            probabilities[view] = torch.softmax(block, -1)
        ctx.scale = scale
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (probabilities,) = ctx.saved_tensors
        out = torch.ops.aten._softmax_backward_data(grad, probabilities, -1, grad.dtype)
        return out.mul_(ctx.scale), None, None, None


def _blocks(scores: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Cut scores [b, n, q, k] into blocks of about the size of the cache: (batch, heads, rows)."""
    batch, heads, queries, keys = scores.shape
    rows = next(row_blocks(batch * heads * queries, keys, scores.device), slice(0, 1)).stop
    head_step, row_step = max(1, rows // max(queries, 1)), min(queries, rows)
    for sample in range(batch):
        for head in range(0, heads, head_step):
            for row in range(0, queries, row_step):
                yield sample, slice(head, head + head_step), slice(row, row + row_step)


class FusedScaleMaskSoftmax(nn.Module):
    """Megatron's module of the same name.

    Args:
        input_in_fp16, input_in_bf16: accepted for compatibility; the input's dtype decides.
        attn_mask_type: a member of `AttnMaskType`; the causal kinds mask by position, and by
            `mask` too if one is passed.
        scaled_masked_softmax_fusion: accepted for compatibility; there is one implementation.
        mask_func: accepted for compatibility; masked scores become `MASKED_SCORE`.
        softmax_in_fp32: compute in fp32.
        scale: factor on the scores; default 1.
        window_size: (left, right) sliding window, or None.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Enum,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.is_causal = "causal" in attn_mask_type.name
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = 1.0 if scale is None else scale
        self.window_size = window_size
        if not math.isfinite(self.scale):
            raise ConfigError(
                f"scale={scale}.",
                rule="attention scores are multiplied with a finite number",
                fix="use 1 / sqrt(head dim), or None for 1",
            )

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return probabilities [b, n, q, k] of scores [b, n, q, k].

        Args:
            mask: bool, True is masked, broadcastable to the scores.
        """
        hidden = mask
        if self.is_causal:
            queries, keys = input.shape[-2:]
            hidden = causal_mask(queries, keys, self.window_size, input.device)
            if mask is not None:
                hidden = hidden | mask
        return scaled_masked_softmax(input, hidden, self.scale, in_fp32=self.softmax_in_fp32)
