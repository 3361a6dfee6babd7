"""Flash attention with dropout that is drawn in registers by place, forward and again backward.

Scores exist a tile at a time (T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism
and Work Partitioning", section 3, arXiv 2307.08691). A tile is masked by window and document; the
mask of dropout is a function of (seed, sample, head in the whole model, row, key), so any kernel
and any rank drops the same. The gradients of keys and values are summed over the heads that share
them.

Keys wider than `CUT` are read in two parts, of `CUT` and of the rest, whose products are added: a
width need not be a power of two, and latent attention has 128 + 64. Scores may be bounded by
c * tanh(score / c).

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
from megatron.core.kernels.triton_kernels.keyed import keeps_in_tile
from megatron.core.parameters.counter_random import keep_threshold
from megatron.core.parameters.keyed_draws import AttentionKeepMask

CUT = 128
"""Widest keys that are read in one part."""


@dataclass(frozen=True)
class Tiles:
    """Tile and warps of each kernel for heads up to some width."""

    key_width: int
    value_width: int
    forward: dict[str, int]
    of_keys: dict[str, int]
    of_queries: dict[str, int]


def _tile(rows: int, columns: int, warps: int, stages: int = 2) -> dict[str, int]:
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


TILES = (
    Tiles(64, 64, _tile(64, 64, 4), _tile(16, 32, 4), _tile(32, 64, 8)),
    Tiles(128, 128, _tile(64, 64, 4), _tile(16, 64, 8), _tile(64, 32, 8)),
    Tiles(192, 128, _tile(64, 32, 8), _tile(32, 32, 8), _tile(32, 32, 8)),
    Tiles(256, 256, _tile(64, 32, 8), _tile(32, 32, 8, 1), _tile(32, 32, 8, 1)),
)
"""The first that is wide enough is taken. Of all sizes those that spill no registers on any target,
with dropout, documents and soft-capping and without."""
_LN_2 = math.log(2.0)
TWO_OVER_LN_2 = tl.constexpr(2.0 / math.log(2.0))


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
def _load_parts(ptr, first, count, stride, width,
                LENGTH: tl.constexpr, D: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Load rows of queries or keys: columns before D, and the REST of them (without one, again)."""
    part = _load(ptr, first, count, stride, width, LENGTH, D)
    rest = part
    if REST:
        rest = _load(ptr + D, first, count, stride, width - D, LENGTH, REST)
    return part, rest


@triton.jit
def _scores(
    q, q_rest, k, k_rest, ids_ptr, first_row, first_column, length, left, right, scale, cap,
    HAS_IDS: tl.constexpr, CAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Return the scaled scores of a tile, minus infinity where a key is hidden, and score / cap."""
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST:
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
    scores = scores * scale
    share = scores
    if CAPS:
        # tanh, of numbers whose square may be infinite; cap is in units of log2 too.
        share = 1.0 - 2.0 / (1.0 + tl.exp2(scores / cap * TWO_OVER_LN_2))
        scores = share * cap
    distance = columns[None, :] - rows[:, None]
    sees = (distance >= -left) & (distance <= right) & (columns < length)[None, :]
    if HAS_IDS:
        of_rows = tl.load(ids_ptr + rows, mask=rows < length, other=-1)
        of_columns = tl.load(ids_ptr + columns, mask=columns < length, other=-2)
        sees = sees & (of_rows[:, None] == of_columns[None, :])
    return tl.where(sees, scores, float("-inf")), share


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, ids_ptr,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, out_s, out_b, out_n,
    heads, heads_per_group, length, key_width, value_width, left, right, scale, cap,
    seed, first_sample, first_head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, CAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Let a block of queries of one head see all of its keys."""
    first_row = tl.program_id(0) * ROWS
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    group = head // heads_per_group
    k_ptr += tl.cast(sample, tl.int64) * k_b + group * k_n
    v_ptr += tl.cast(sample, tl.int64) * v_b + group * v_n
    ids_ptr += tl.cast(sample, tl.int64) * length
    q, q_rest = _load_parts(q_ptr + tl.cast(sample, tl.int64) * q_b + head * q_n,
                            first_row, length, q_s, key_width, ROWS, D, REST)  # fmt: skip
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, E), tl.float32)
    begin = tl.maximum(first_row - left, 0) // COLUMNS * COLUMNS
    end = tl.minimum(first_row + ROWS + right, length)
    for first in range(begin, end, COLUMNS):
        k, k_rest = _load_parts(k_ptr, first, length, k_s, key_width, COLUMNS, D, REST)
        v = _load(v_ptr, first, length, v_s, value_width, COLUMNS, E)
        scores, _ = _scores(q, q_rest, k, k_rest, ids_ptr, first_row, first, length, left, right,
                            scale, cap, HAS_IDS, CAPS, ROWS, COLUMNS, REST)  # fmt: skip
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
    q, q_rest, k, k_rest, v, grad, lse_ptr, delta_ptr, ids_ptr, first_row, first_column, length,
    left, right, scale, cap, seed, sample, head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, CAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Return the probabilities of a tile after dropout, and the gradient of its scores."""
    rows = first_row + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + rows, mask=rows < length, other=0.0)
    delta = tl.load(delta_ptr + rows, mask=rows < length, other=0.0)
    scores, share = _scores(q, q_rest, k, k_rest, ids_ptr, first_row, first_column, length, left,
                            right, scale, cap, HAS_IDS, CAPS, ROWS, COLUMNS, REST)  # fmt: skip
    p = tl.where((rows < length)[:, None], tl.exp2(scores - lse[:, None]), 0.0)
    grad_p = tl.dot(grad, tl.trans(v), input_precision="ieee")
    dropped = p
    if DROPS:
        keeps = keeps_in_tile(seed, sample, head, first_row, first_column, threshold, ROWS, COLUMNS)
        dropped = tl.where(keeps, p * factor, 0.0)
        grad_p = tl.where(keeps, grad_p * factor, 0.0)
    grad_scores = p * (grad_p - delta[:, None])
    if CAPS:
        grad_scores = grad_scores * (1.0 - share * share)
    return dropped, grad_scores


@triton.jit
def backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, ids_ptr, grad_k_ptr, grad_v_ptr,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, out_s, out_b, out_n,
    heads, heads_per_group, length, key_width, value_width, left, right, scale, cap, slope,
    seed, first_sample, first_head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, CAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a block of keys and values over the heads and queries that see it.

    grad_k, grad_v: [s, b, g, d] and [s, b, g, e], contiguous.
    """
    first = tl.program_id(0) * COLUMNS
    groups = heads // heads_per_group
    sample, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    wide = tl.cast(sample, tl.int64)
    ids_ptr += wide * length
    k, k_rest = _load_parts(k_ptr + wide * k_b + group * k_n,
                            first, length, k_s, key_width, COLUMNS, D, REST)  # fmt: skip
    v = _load(v_ptr + wide * v_b + group * v_n, first, length, v_s, value_width, COLUMNS, E)
    grad_k = tl.zeros((COLUMNS, D), tl.float32)
    if REST:
        grad_k_rest = tl.zeros((COLUMNS, REST), tl.float32)
    grad_v = tl.zeros((COLUMNS, E), tl.float32)
    begin = tl.maximum(first - right, 0) // ROWS * ROWS
    end = tl.minimum(first + COLUMNS + left, length)
    for turn in range(heads_per_group):
        head = group * heads_per_group + turn
        row_of_numbers = (wide * heads + head) * length
        for first_row in range(begin, end, ROWS):
            q, q_rest = _load_parts(q_ptr + wide * q_b + head * q_n,
                                    first_row, length, q_s, key_width, ROWS, D, REST)  # fmt: skip
            grad = _load(grad_ptr + wide * out_b + head * out_n,
                         first_row, length, out_s, value_width, ROWS, E)  # fmt: skip
            p, grad_scores = _gradients(
                q, q_rest, k, k_rest, v, grad, lse_ptr + row_of_numbers,
                delta_ptr + row_of_numbers, ids_ptr, first_row, first, length, left, right, scale,
                cap, seed, (first_sample + sample).to(tl.int32), first_head + head, threshold,
                factor, HAS_IDS, DROPS, CAPS, ROWS, COLUMNS, REST,
            )  # fmt: skip
            grad_v += tl.dot(tl.trans(p).to(grad.dtype), grad, input_precision="ieee")
            grad_scores = tl.trans(grad_scores).to(q.dtype)
            grad_k += tl.dot(grad_scores, q, input_precision="ieee")
            if REST:
                grad_k_rest += tl.dot(grad_scores, q_rest, input_precision="ieee")
    row = tl.num_programs(1)
    grad_k_ptr += tl.program_id(1) * key_width
    _store(grad_k_ptr, grad_k * slope, first, length, row * key_width, key_width, COLUMNS, D)
    if REST:
        _store(grad_k_ptr + D, grad_k_rest * slope,
               first, length, row * key_width, key_width - D, COLUMNS, REST)  # fmt: skip
    _store(grad_v_ptr + tl.program_id(1) * value_width, grad_v,
           first, length, row * value_width, value_width, COLUMNS, E)  # fmt: skip


@triton.jit
def backward_queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, ids_ptr, grad_q_ptr,
    q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n, out_s, out_b, out_n,
    heads, heads_per_group, length, key_width, value_width, left, right, scale, cap, slope,
    seed, first_sample, first_head, threshold, factor,
    HAS_IDS: tl.constexpr, DROPS: tl.constexpr, CAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of a block of queries of one head over its keys.

    grad_q: [s, b, n, d], contiguous.
    """
    first_row = tl.program_id(0) * ROWS
    sample, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    wide, group = tl.cast(sample, tl.int64), head // heads_per_group
    ids_ptr += wide * length
    numbers = tl.cast(tl.program_id(1), tl.int64) * length
    q, q_rest = _load_parts(q_ptr + wide * q_b + head * q_n,
                            first_row, length, q_s, key_width, ROWS, D, REST)  # fmt: skip
    grad = _load(grad_ptr + wide * out_b + head * out_n,
                 first_row, length, out_s, value_width, ROWS, E)  # fmt: skip
    grad_q = tl.zeros((ROWS, D), tl.float32)
    if REST:
        grad_q_rest = tl.zeros((ROWS, REST), tl.float32)
    begin = tl.maximum(first_row - left, 0) // COLUMNS * COLUMNS
    end = tl.minimum(first_row + ROWS + right, length)
    for first in range(begin, end, COLUMNS):
        k, k_rest = _load_parts(k_ptr + wide * k_b + group * k_n,
                                first, length, k_s, key_width, COLUMNS, D, REST)  # fmt: skip
        v = _load(v_ptr + wide * v_b + group * v_n, first, length, v_s, value_width, COLUMNS, E)
        _, grad_scores = _gradients(
            q, q_rest, k, k_rest, v, grad, lse_ptr + numbers, delta_ptr + numbers, ids_ptr,
            first_row, first, length, left, right, scale, cap, seed,
            (first_sample + sample).to(tl.int32), first_head + head, threshold, factor,
            HAS_IDS, DROPS, CAPS, ROWS, COLUMNS, REST,
        )  # fmt: skip
        grad_scores = grad_scores.to(k.dtype)
        grad_q += tl.dot(grad_scores, k, input_precision="ieee")
        if REST:
            grad_q_rest += tl.dot(grad_scores, k_rest, input_precision="ieee")
    row = tl.num_programs(1) * key_width
    grad_q_ptr += tl.program_id(1) * key_width
    _store(grad_q_ptr, grad_q * slope, first_row, length, row, key_width, ROWS, D)
    if REST:
        _store(grad_q_ptr + D, grad_q_rest * slope,
               first_row, length, row, key_width - D, ROWS, REST)  # fmt: skip


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
        launch = _tiles(key, value).forward
        forward_kernel[(triton.cdiv(s, launch["ROWS"]), b * n)](
            query, key, value, out, lse, query if ids is None else ids,
            *_common(query, key, value, out, options), *_numbers(drawn),
            **_constants(key, value, ids, options, drawn), **launch,
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
        constants = _constants(key, value, ids, ctx.options, ctx.drawn)
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
        tiles = _tiles(key, value)
        of_keys, of_queries = tiles.of_keys, tiles.of_queries
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
    return *strides, *sizes, left, right, options.scale / _LN_2, (options.softcap or 0.0) / _LN_2


def _numbers(drawn: Draw) -> tuple[int | float, ...]:
    return drawn.seed, drawn.first_sample, drawn.first_head, drawn.threshold, drawn.factor


def _tiles(key: Tensor, value: Tensor) -> Tiles:
    widths = key.shape[-1], value.shape[-1]
    fitting = (t for t in TILES if widths[0] <= t.key_width and widths[1] <= t.value_width)
    return next(fitting)


def _constants(
    key: Tensor, value: Tensor, ids: Tensor | None, options: AttentionOptions, drawn: Draw
) -> dict[str, Any]:
    kind = {
        "HAS_IDS": ids is not None,
        "DROPS": drawn.threshold > 0,
        "CAPS": options.softcap is not None,
    }
    return kind | widths_of(key.shape[-1], value.shape[-1])


def widths_of(key_width: int, value_width: int) -> dict[str, int]:
    """Return the widths that the kernels compute with: of keys in one part or two, of values."""
    rest = key_width - CUT
    return {
        "D": min(CUT, _power_of_2(key_width)),
        "REST": 0 if rest <= 0 else max(64, _power_of_2(rest)),
        "E": _power_of_2(value_width),
    }


def _power_of_2(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def flash_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend within a window and a document, with dropout independent of the layout.

    Args:
        query: [s, b, n, d]. key: [s, b, g, d]. value: [s, b, g, e]. No head is wider than 256.
        options: see `AttentionKernel`.
    Returns:
        [s, b, n * e].
    """
    s, b = query.shape[:2]
    tensors = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return _FlashAttention.apply(*tensors, options, Draw.next(options, s)).reshape(s, b, -1)
