"""Adam in one pass over state, gradient and weights.

`fp32_kernel` updates fp32 state. `adam_kernel` updates blocks of state as they are stored: a
program takes one block of 128 elements, decodes both moments and the main weight, updates them in
fp32, rounds them at random to their types with the bits that `optimizer.state_codec` draws for the
same place and step, and writes the model's weight. (D. P. Kingma, J. Ba, "Adam: A Method for
Stochastic Optimization", arXiv 1412.6980; I. Loshchilov, F. Hutter, "Decoupled Weight Decay
Regularization", arXiv 1711.05101.)

FP8 codes are made and read by arithmetic on bits, which every generation of GPUs has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

FP32, BF16, FP16, FP8, REMAINDER = range(5)
"""Formats of a column; `REMAINDER`: the bits of fp32 weights that bf16 weights lack."""
_FP32, _BF16, _FP16, _REMAINDER = (tl.constexpr(k) for k in (FP32, BF16, FP16, REMAINDER))
BLOCK = 128
NUM_WARPS = 1
"""Four elements for each thread."""
ELEMENTS, FP32_WARPS = 1024, 8
"""Elements and warps of a program of `fp32_kernel`: four elements for each thread, so that loads
of fp32 and stores of half precision have one layout and no value passes through shared memory."""


@triton.jit
def _decode(column_ptr, block, lanes, KIND: tl.constexpr, ROOT: tl.constexpr):
    """Return the fp32 values [128] of a block."""
    if KIND == _FP32:
        return tl.load(column_ptr.to(tl.pointer_type(tl.float32)) + block * 128 + lanes)
    if KIND == _BF16:
        half = tl.load(column_ptr.to(tl.pointer_type(tl.bfloat16)) + block * 128 + lanes)
        return half.to(tl.float32)
    size: tl.constexpr = 2 if KIND == _FP16 else 1
    row = column_ptr + block * (128 * size + 4)
    if KIND == _FP16:
        values = tl.load(row.to(tl.pointer_type(tl.float16)) + lanes).to(tl.float32)
    else:
        code = tl.load(row + lanes).to(tl.int32)
        magnitude = code & 0x7F
        normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
        values = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        values = tl.where(code > 127, -values, values)
    values *= tl.load((row + 128 * size).to(tl.pointer_type(tl.float32)))
    return values * values if ROOT else values


@triton.jit
def _round_at_random(values, noise, DROPPED: tl.constexpr):
    """Stochastic rounding: add random low bits to fp32 values, then cut the low bits off."""
    mask: tl.constexpr = (1 << DROPPED) - 1
    bits = values.to(tl.uint32, bitcast=True) + (noise & mask)
    return (bits & (0xFFFFFFFF - mask)).to(tl.float32, bitcast=True)


@triton.jit
def _encode(column_ptr, block, lanes, values, noise, KIND: tl.constexpr, ROOT: tl.constexpr):
    """Store the fp32 values [128] of a block."""
    if KIND == _FP32:
        tl.store(column_ptr.to(tl.pointer_type(tl.float32)) + block * 128 + lanes, values)
    elif KIND == _BF16:
        bits = _round_at_random(values, noise, 16).to(tl.uint32, bitcast=True) >> 16
        place = column_ptr.to(tl.pointer_type(tl.uint16)) + block * 128 + lanes
        tl.store(place, bits.to(tl.uint16))
    else:
        is_half: tl.constexpr = KIND == _FP16
        size: tl.constexpr = 2 if is_half else 1
        dropped: tl.constexpr = 13 if is_half else 20
        smallest: tl.constexpr = 2.0**-14 if is_half else 2.0**-6
        spacing: tl.constexpr = smallest * 2.0 ** (dropped - 23)
        largest: tl.constexpr = 65504.0 if is_half else 448.0
        # The largest number of the type is fraction * 2^exponent, with a fraction in [0.5, 1).
        top_exponent: tl.constexpr = 16 if is_half else 9
        top_fraction: tl.constexpr = 65504.0 / 65536.0 if is_half else 0.875
        is_positive = values > 0
        if ROOT:
            values = tl.sqrt_rn(values)
        highest = tl.max(tl.abs(values))
        bits = highest.to(tl.int32, bitcast=True)
        fraction = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
        exponent = (bits >> 23) - 126 - top_exponent + (fraction > top_fraction).to(tl.int32)
        exponent = tl.where(bits == 0, -top_exponent, exponent)
        exponent = tl.minimum(tl.maximum(exponent, -120), 120)
        scaled = values * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        normal = _round_at_random(scaled, noise, dropped)
        # Below the smallest normal number values are evenly spaced.
        uniform = (noise & 0xFFFF).to(tl.float32) * (1.0 / 65536.0)
        even = tl.floor(tl.abs(scaled) * (1.0 / spacing) + uniform) * spacing
        even = tl.where(scaled < 0, -even, even)
        scaled = tl.where(tl.abs(scaled) < smallest, even, normal)
        if ROOT:
            scaled = tl.where(is_positive, tl.maximum(scaled, spacing), scaled)
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        row = column_ptr + block * (128 * size + 4)
        if is_half:
            tl.store(row.to(tl.pointer_type(tl.float16)) + lanes, scaled.to(tl.float16))
        else:
            bits = scaled.to(tl.uint32, bitcast=True)
            magnitude = tl.abs(scaled)
            normal_code = ((bits & 0x7FFFFFFF) >> 20) - 960
            even_code = (magnitude * 512.0).to(tl.uint32)
            code = tl.where(magnitude < smallest, even_code, normal_code) | (bits >> 31 << 7)
            tl.store(row + lanes, code.to(tl.uint8))
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        tl.store((row + 128 * size).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def _random_bits(place, lanes, step_bits):
    """Return the hash of elements' places, uint32 [128]: `optimizer.state_codec.random_bits`."""
    mixed = (place * 128 + lanes).to(tl.uint32) * 0x9E3779B1 + tl.cast(step_bits, tl.uint32)
    mixed ^= mixed >> 16
    mixed *= 0x21F0AAAD
    mixed ^= mixed >> 15
    mixed *= 0x735A2D97
    return mixed ^ (mixed >> 15)


@triton.jit
def _updated(
    grad, first, second, main, lr, beta2, share1, share2, eps, decay, correction1, correction2,
    DECOUPLES: tl.constexpr,
):  # fmt: skip
    """Return the moments and the main weight after an update, in fp32; see `adam_kernel`."""
    if DECOUPLES:
        main *= 1.0 - lr * decay
    else:
        grad += decay * main
    first += share1 * (grad - first)
    second = beta2 * second + share2 * grad * grad
    main -= lr / correction1 * first / (tl.sqrt_rn(second) / correction2 + eps)
    return first, second, main


@triton.jit
def _correction(step, log_beta):
    """Return 1 - beta^step in fp32, without cancellation: a series where beta^step is near 1."""
    x = step * log_beta
    series = 1.0
    for k in tl.static_range(7):
        series = 1.0 + x / (8 - k) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def fp32_kernel(
    grad_ptr, main_ptr, first_ptr, second_ptr, weight_ptr, step_ptr, scale_ptr, refused_ptr, numel,
    lr, beta2, share1, share2, eps, decay, log_beta1, log_beta2,
    HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr, DECOUPLES: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Update a range of a main weight and its moments, all fp32, and write the model's weight.

    step, scale, refused: fp32 [], the number of this update, the divisor of the gradient, and 1 if
    nothing may change. share1, share2: 1 - beta.
    """
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    factor = 1.0
    if HAS_SCALE:
        numel = tl.where(tl.load(refused_ptr) == 0.0, numel, 0)
        factor = 1.0 / tl.load(scale_ptr)
    inside = place < numel
    step = tl.load(step_ptr)
    first, second, main = _updated(
        tl.load(grad_ptr + place, mask=inside) * factor, tl.load(first_ptr + place, mask=inside),
        tl.load(second_ptr + place, mask=inside), tl.load(main_ptr + place, mask=inside),
        lr, beta2, share1, share2, eps, decay,
        _correction(step, log_beta1), tl.sqrt_rn(_correction(step, log_beta2)), DECOUPLES,
    )  # fmt: skip
    tl.store(first_ptr + place, first, mask=inside)
    tl.store(second_ptr + place, second, mask=inside)
    tl.store(main_ptr + place, main, mask=inside)
    if HAS_WEIGHT:
        tl.store(weight_ptr + place, main.to(weight_ptr.dtype.element_ty), mask=inside)


def update_fp32(
    gradient: Tensor, main: Tensor, first: Tensor, second: Tensor, weight: Tensor | None,
    step: Tensor, scaling: tuple[Tensor, Tensor] | None, settings: Mapping[str, Any],
    decouples_decay: bool,
) -> None:  # fmt: skip
    """Update a main weight and its moments in place. The host waits for nothing.

    Args:
        gradient, main, first, second: fp32, contiguous, of one shape.
        weight: the model's weight in half precision to write, of the same shape, or None.
        step: fp32 [], the number of this update, from 1.
        scaling: fp32 [] each, the divisor of the gradient, and 1 if nothing may change.
        settings: lr, betas, eps, weight_decay.
    """
    beta1, beta2 = map(float, settings["betas"])
    scale, refused = scaling or (step, step)
    fp32_kernel[(triton.cdiv(main.numel(), ELEMENTS),)](
        gradient, main, first, second, main if weight is None else weight, step, scale, refused,
        main.numel(), float(settings["lr"]), beta2, 1.0 - beta1, 1.0 - beta2, settings["eps"],
        settings["weight_decay"], *(math.log(b) if b else -math.inf for b in (beta1, beta2)),
        HAS_WEIGHT=weight is not None, HAS_SCALE=scaling is not None, DECOUPLES=decouples_decay,
        ELEMENTS=ELEMENTS, num_warps=FP32_WARPS,
    )  # fmt: skip


@triton.jit
def adam_kernel(
    grad_ptr, weight_ptr, first_ptr, second_ptr, main_ptr, numel, first_place, step_bits,
    factor, lr, beta2, share1, share2, eps, decay, correction1, correction2,
    FIRST: tl.constexpr, SECOND: tl.constexpr, MAIN: tl.constexpr, HAS_MAIN: tl.constexpr,
    DECOUPLES: tl.constexpr, MAIN_SHIFT: tl.constexpr,
):  # fmt: skip
    """Update one block of a shard.

    weight: the model's; without a main weight it is fp32 and updated itself. numel: elements of the
    shard's part, whose last block may be partly filled. share1, share2: 1 - beta.
    correction2: root of the bias correction of the second moment.
    """
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, 128)
    place = block * 128 + lanes
    inside = place < numel
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32) * factor
    first = _decode(first_ptr, block, lanes, FIRST, False)
    second = _decode(second_ptr, block, lanes, SECOND, True)
    if not HAS_MAIN:
        main = tl.load(weight_ptr + place, mask=inside, other=0.0)
    elif MAIN == _REMAINDER:
        upper = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.int16, bitcast=True)
        lower = tl.load(main_ptr.to(tl.pointer_type(tl.int16)) + place, mask=inside, other=0)
        main = ((upper.to(tl.int32) << 16) + lower.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        main = _decode(main_ptr, block, lanes, MAIN, False)
    first, second, main = _updated(
        grad, first, second, main, lr, beta2, share1, share2, eps, decay, correction1, correction2,
        DECOUPLES,
    )  # fmt: skip
    first = tl.where(inside, first, 0.0)
    second = tl.where(inside, second, 0.0)
    main = tl.where(inside, main, 0.0)
    noise = _random_bits((first_place + tl.program_id(0)).to(tl.int32), lanes, step_bits)
    _encode(first_ptr, block, lanes, first, noise, FIRST, False)
    _encode(second_ptr, block, lanes, second, noise >> 12, SECOND, True)
    if not HAS_MAIN:
        tl.store(weight_ptr + place, main, mask=inside)
    elif MAIN == _REMAINDER:
        bits = main.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        lower = (bits - (upper << 16)).to(tl.int16)
        upper = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weight_ptr + place, upper, mask=inside)
        tl.store(main_ptr.to(tl.pointer_type(tl.int16)) + place, lower, mask=inside)
    else:
        _encode(main_ptr, block, lanes, main, noise >> MAIN_SHIFT, MAIN, False)
        tl.store(weight_ptr + place, main.to(weight_ptr.dtype.element_ty), mask=inside)


def update_blocks(
    gradient: Tensor, weight: Tensor, columns: tuple[Tensor, Tensor, Tensor | None],
    kinds: tuple[int, int, int], first_place: int, step: int, factor: float,
    settings: dict[str, float], decouples_decay: bool,
) -> None:  # fmt: skip
    """Update consecutive blocks of one shard in place.

    Args:
        gradient: [e] of any dtype; weight: [e], the model's, both contiguous.
        columns: uint8 [blocks, bytes] of the first moment, the second (its root, if it has a scale)
            and the main weight, or None; kinds: how they are stored.
        first_place: number of the first block, a key of the random bits.
        step: number of earlier updates. factor: factor on the gradient.
        settings: lr, beta1, beta2, eps, weight_decay.
    """
    first, second, main = columns
    count, beta1, beta2 = step + 1, settings["beta1"], settings["beta2"]
    adam_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
        gradient, weight, first, second, first if main is None else main, weight.numel(),
        first_place, (step * 0x85EBCA6B) & 0xFFFFFFFF, factor, settings["lr"], beta2,
        1.0 - beta1, 1.0 - beta2, settings["eps"], settings["weight_decay"],
        1.0 - beta1**count, (1.0 - beta2**count) ** 0.5,
        FIRST=kinds[0], SECOND=kinds[1], MAIN=kinds[2], HAS_MAIN=main is not None,
        DECOUPLES=decouples_decay, MAIN_SHIFT=6, num_warps=NUM_WARPS,
    )  # fmt: skip
