"""Flash attention with dropout that is drawn in registers by place, forward and again backward.

Scores exist a tile at a time (T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism
and Work Partitioning", section 3, arXiv 2307.08691). A tile is masked by window and document; the
mask of dropout is a function of (seed, sample, head in the whole model, row, key), so any kernel
and any rank drops the same. The gradients of keys and values are summed over the heads that share
them.

Legend: s sequence, b micro batch, n query heads and g key/value heads of this rank, r = n/g, d and
e widths of key and value heads. Scores are in units of log2: exponentials are powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.torch_attention import unfused
from megatron.core.kernels.triton_kernels.keyed import keeps_in_tile
from megatron.core.parameters.counter_random import keep_threshold
from megatron.core.parameters.keyed_draws import AttentionKeepMask

WIDEST = 128
"""Wider heads take more registers and shared memory than every target has: the formula is used."""
FORWARD = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 2}
BACKWARD_OF_QUERIES = {
    64: {"ROWS": 32, "COLUMNS": 64, "num_warps": 8, "num_stages": 2},
    128: {"ROWS": 64, "COLUMNS": 64, "num_warps": 8, "num_stages": 2},
}
BACKWARD_OF_KEYS = {
    64: {"ROWS": 16, "COLUMNS": 32, "num_warps": 4, "num_stages": 2},
    128: {"ROWS": 16, "COLUMNS": 64, "num_warps": 8, "num_stages": 2},
}
"""Widest head -> tile and warps; of all kernels those that spill no registers on any target, with
dropout and documents and without."""
_LN_2 = math.log(2.0)


@dataclass(frozen=True)
class Draw:
    """Where the numbers of dropout belong; a threshold of 0 drops nothing."""

    seed: int = 0
    first_sample: int = 0
    first_head: int = 0
    threshold: int = 0
    factor: float = 1.0

    @staticmethod
    def next(options: AttentionOptions, num_keys: int) -> Draw:
        """Take the next draw at the current place of the computation, if there is dropout."""
        if not options.dropout:
            return Draw()
        keep = 1.0 - options.dropout
        drawn = AttentionKeepMask.next(keep, num_keys)
        return Draw(
            drawn.seed, drawn.first_sample, options.first_head, keep_threshold(keep), 1.0 / keep
        )


@triton.jit
def _load(ptr, first, count, stride, width, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows first ... first + LENGTH - 1 of `count`, zeros beyond."""
    rows = first + tl.arange(0, LENGTH)
    columns = tl.arange(0, WIDTH)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    place = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(ptr + place, mask=inside, other=0.0)


@triton.jit
def _store(ptr, x, first, count, stride, width, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows first ... first + LENGTH - 1 of `count`."""
    rows = first + tl.arange(0, LENGTH)
    columns = tl.arange(0, WIDTH)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    place = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(ptr + place, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scores(
    q, k, ids_ptr, first_row, first_column, length, left, right, scale,
    HAS_IDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the scaled scores of a tile, minus infinity where a key is hidden."""
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    distance = columns[None, :] - rows[:, None]
    sees = (distance >= -left) & (distance <= right) & (columns < length)[None, :]
    if HAS_IDS:
        of_rows = tl.load(ids_ptr + rows, mask=rows < length, other=-1)
        of_columns = tl.load(ids_ptr + columns, mask=columns < length, other=-2)
        sees = sees & (of_rows[:, None] == of_columns[None, :])
    return tl.where(sees, scores, float("-inf"))


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, ids_ptr,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, out_s, out_b, out_n,
    heads, heads_per_group, length, key_width, value_width, left, right, scale,
    seed, first_sample, first_head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Let a block of queries of one head see all of its keys."""
    first_row = tl.program_id(0) * ROWS
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    group = head // heads_per_group
    k_ptr += tl.cast(sample, tl.int64) * k_b + group * k_n
    v_ptr += tl.cast(sample, tl.int64) * v_b + group * v_n
    ids_ptr += tl.cast(sample, tl.int64) * length
    q = _load(q_ptr + tl.cast(sample, tl.int64) * q_b + head * q_n,
              first_row, length, q_s, key_width, ROWS, D)  # fmt: skip
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, E), tl.float32)
    begin = tl.maximum(first_row - left, 0) // COLUMNS * COLUMNS
    end = tl.minimum(first_row + ROWS + right, length)
    for first in range(begin, end, COLUMNS):
        k = _load(k_ptr, first, length, k_s, key_width, COLUMNS, D)
        v = _load(v_ptr, first, length, v_s, value_width, COLUMNS, E)
        scores = _scores(q, k, ids_ptr, first_row, first, length, left, right, scale,
                         HAS_IDS, ROWS, COLUMNS)  # fmt: skip
        joined = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet has no finite number to subtract.
        base = tl.where(joined == float("-inf"), 0.0, joined)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        if DROPS:
            keeps = keeps_in_tile(seed, (first_sample + sample).to(tl.int32), first_head + head,
                                  first_row, first, threshold, ROWS, COLUMNS)  # fmt: skip
            p = tl.where(keeps, p * factor, 0.0)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        highest = joined
    rows = first_row + tl.arange(0, ROWS)
    total = tl.where(total == 0.0, 1.0, total)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    place = tl.cast(tl.program_id(1), tl.int64) * length + rows
    tl.store(lse_ptr + place, base + tl.log2(total), mask=rows < length)
    _store(out_ptr + tl.cast(sample, tl.int64) * out_b + head * out_n, out / total[:, None],
           first_row, length, out_s, value_width, ROWS, E)  # fmt: skip


@triton.jit
def _gradients(
    q, k, v, grad, lse_ptr, delta_ptr, ids_ptr, first_row, first_column, length, left, right,
    scale, seed, sample, head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the probabilities of a tile after dropout, and the gradient of its scores."""
    rows = first_row + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + rows, mask=rows < length, other=0.0)
    delta = tl.load(delta_ptr + rows, mask=rows < length, other=0.0)
    scores = _scores(q, k, ids_ptr, first_row, first_column, length, left, right, scale,
                     HAS_IDS, ROWS, COLUMNS)  # fmt: skip
    p = tl.where((rows < length)[:, None], tl.exp2(scores - lse[:, None]), 0.0)
    grad_p = tl.dot(grad, tl.trans(v), input_precision="ieee")
    dropped = p
    if DROPS:
        keeps = keeps_in_tile(seed, sample, head, first_row, first_column, threshold, ROWS, COLUMNS)
        dropped = tl.where(keeps, p * factor, 0.0)
        grad_p = tl.where(keeps, grad_p * factor, 0.0)
    return dropped, p * (grad_p - delta[:, None])


@triton.jit
def backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, ids_ptr, grad_k_ptr, grad_v_ptr,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, out_s, out_b, out_n,
    heads, heads_per_group, length, key_width, value_width, left, right, scale, slope,
    seed, first_sample, first_head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a block of keys and values over the heads and queries that see it.

    grad_k, grad_v: [s, b, g, d] and [s, b, g, e], contiguous.
    """
    first = tl.program_id(0) * COLUMNS
    groups = heads // heads_per_group
    sample, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    wide = tl.cast(sample, tl.int64)
    ids_ptr += wide * length
    k = _load(k_ptr + wide * k_b + group * k_n, first, length, k_s, key_width, COLUMNS, D)
    v = _load(v_ptr + wide * v_b + group * v_n, first, length, v_s, value_width, COLUMNS, E)
    grad_k = tl.zeros((COLUMNS, D), tl.float32)
    grad_v = tl.zeros((COLUMNS, E), tl.float32)
    begin = tl.maximum(first - right, 0) // ROWS * ROWS
    end = tl.minimum(first + COLUMNS + left, length)
    for turn in range(heads_per_group):
        head = group * heads_per_group + turn
        row_of_numbers = (wide * heads + head) * length
        for first_row in range(begin, end, ROWS):
            q = _load(q_ptr + wide * q_b + head * q_n, first_row, length, q_s, key_width, ROWS, D)
            grad = _load(grad_ptr + wide * out_b + head * out_n,
                         first_row, length, out_s, value_width, ROWS, E)  # fmt: skip
            p, grad_scores = _gradients(
                q, k, v, grad, lse_ptr + row_of_numbers, delta_ptr + row_of_numbers, ids_ptr,
                first_row, first, length, left, right, scale, seed,
                (first_sample + sample).to(tl.int32), first_head + head, threshold, factor,
                HAS_IDS, DROPS, ROWS, COLUMNS,
            )  # fmt: skip
            grad_v += tl.dot(tl.trans(p).to(grad.dtype), grad, input_precision="ieee")
            grad_k += tl.dot(tl.trans(grad_scores).to(q.dtype), q, input_precision="ieee")
    row = tl.num_programs(1)
    _store(grad_k_ptr + tl.program_id(1) * key_width, grad_k * slope,
           first, length, row * key_width, key_width, COLUMNS, D)  # fmt: skip
    _store(grad_v_ptr + tl.program_id(1) * value_width, grad_v,
           first, length, row * value_width, value_width, COLUMNS, E)  # fmt: skip


@triton.jit
def backward_queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, ids_ptr, grad_q_ptr,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, out_s, out_b, out_n,
    heads, heads_per_group, length, key_width, value_width, left, right, scale, slope,
    seed, first_sample, first_head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a block of queries of one head over its keys.

    grad_q: [s, b, n, d], contiguous.
    """
    first_row = tl.program_id(0) * ROWS
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    wide, group = tl.cast(sample, tl.int64), head // heads_per_group
    ids_ptr += wide * length
    numbers = tl.cast(tl.program_id(1), tl.int64) * length
    q = _load(q_ptr + wide * q_b + head * q_n, first_row, length, q_s, key_width, ROWS, D)
    grad = _load(grad_ptr + wide * out_b + head * out_n,
                 first_row, length, out_s, value_width, ROWS, E)  # fmt: skip
    grad_q = tl.zeros((ROWS, D), tl.float32)
    begin = tl.maximum(first_row - left, 0) // COLUMNS * COLUMNS
    end = tl.minimum(first_row + ROWS + right, length)
    for first in range(begin, end, COLUMNS):
        k = _load(k_ptr + wide * k_b + group * k_n, first, length, k_s, key_width, COLUMNS, D)
        v = _load(v_ptr + wide * v_b + group * v_n, first, length, v_s, value_width, COLUMNS, E)
        _, grad_scores = _gradients(
            q, k, v, grad, lse_ptr + numbers, delta_ptr + numbers, ids_ptr, first_row, first,
            length, left, right, scale, seed, (first_sample + sample).to(tl.int32),
            first_head + head, threshold, factor, HAS_IDS, DROPS, ROWS, COLUMNS,
        )  # fmt: skip
        grad_q += tl.dot(grad_scores.to(k.dtype), k, input_precision="ieee")
    _store(grad_q_ptr + tl.program_id(1) * key_width, grad_q * slope,
           first_row, length, tl.num_programs(1) * key_width, key_width, ROWS, D)  # fmt: skip


class _FlashAttention(torch.autograd.Function):
    """query [s, b, n, d], key [s, b, g, d], value [s, b, g, e] -> [s, b, n, e]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, drawn: Draw
    ) -> Tensor:
        s, b, n, _ = query.shape
        out = query.new_empty((s, b, n, value.shape[-1]))
        lse = query.new_empty((b, n, s), dtype=torch.float32)
        ids = options.mask.document_ids
        ids = None if ids is None else ids.to(torch.int32).contiguous()
        forward_kernel[(triton.cdiv(s, FORWARD["ROWS"]), b * n)](
            query, key, value, out, lse, query if ids is None else ids,
            *_common(query, key, value, out, options), *_numbers(drawn),
            **_constants(key, value, ids, drawn), **FORWARD,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse, ids)
        ctx.options, ctx.drawn = options, drawn
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, ids = ctx.saved_tensors
        (s, b, n, _), g = query.shape, key.shape[2]
        grad = grad.contiguous()
        delta = (out.float() * grad.float()).sum(-1).permute(1, 2, 0).contiguous()
        read = (query, key, value, grad, lse, delta, query if ids is None else ids)
        others = (
            *_common(query, key, value, out, ctx.options),
            ctx.options.scale,
            *_numbers(ctx.drawn),
        )
        constants = _constants(key, value, ids, ctx.drawn)
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
        widest = 64 if max(constants["D"], constants["E"]) <= 64 else 128
        of_keys, of_queries = BACKWARD_OF_KEYS[widest], BACKWARD_OF_QUERIES[widest]
        backward_keys_kernel[(triton.cdiv(s, of_keys["COLUMNS"]), b * g)](
            *read, *grads[1:], *others, **constants, **of_keys
        )
        backward_queries_kernel[(triton.cdiv(s, of_queries["ROWS"]), b * n)](
            *read, grads[0], *others, **constants, **of_queries
        )
        return *grads, None, None


def _common(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, options: AttentionOptions
) -> tuple[Any, ...]:
    s, _, n, d = query.shape
    strides = [stride for x in (query, key, value, out) for stride in x.stride()[:3]]
    left, right = (s if side < 0 else side for side in options.mask.window)
    sizes = n, n // key.shape[2], s, d, value.shape[-1]
    return *strides, *sizes, left, right, options.scale / _LN_2


def _numbers(drawn: Draw) -> tuple[int | float, ...]:
    return drawn.seed, drawn.first_sample, drawn.first_head, drawn.threshold, drawn.factor


def _constants(key: Tensor, value: Tensor, ids: Tensor | None, drawn: Draw) -> dict[str, Any]:
    widths = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (key, value))
    return dict(zip("DE", widths, strict=True), HAS_IDS=ids is not None, DROPS=drawn.threshold > 0)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend within a window and a document, with dropout independent of the layout.

    Args:
        query: [s, b, n, d]. key: [s, b, g, d]. value: [s, b, g, e]. options: see `AttentionKernel`.
    Returns:
        [s, b, n * e].
    """
    s, b = query.shape[:2]
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return unfused(query, key, value, options)
    tensors = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return _FlashAttention.apply(*tensors, options, Draw.next(options, s)).reshape(s, b, -1)
