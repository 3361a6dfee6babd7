"""Named tolerances, each with the rounding argument that gives its size, and `assert_close`.

Notation: u is the unit roundoff, 2^-24 (6.0e-8) for fp32 and 2^-9 (2.0e-3) for bf16. A sum of K
products computed in two different orders differs, relative to the typical size of such sums, by
about sqrt(K) u, and by at most 2 K u (N. Higham, "Accuracy and Stability of Numerical
Algorithms", section 4.2). The error of one element is measured against the larger of its own
magnitude and the tensor's root mean square: an element that is small because its terms cancel
carries the rounding error of its terms, not of its value.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Allowed error of an element e: atol + rtol * max(|e|, rms of the expected tensor)."""

    name: str
    rtol: float
    atol: float
    reason: str


EXACT = Tolerance("EXACT", 0.0, 0.0, "the same operations in the same order: equal to the bit")

FP32_ROUNDED_ONCE = Tolerance(
    "FP32_ROUNDED_ONCE",
    rtol=2.0**-21,
    atol=1e-9,
    reason="the same formula with its few elementwise operations in another order: 8 u",
)

FP32_REORDERED_SUM = Tolerance(
    "FP32_REORDERED_SUM",
    rtol=1e-5,
    atol=1e-7,
    reason="sums of up to K = 4096 products split over ranks: sqrt(K) u = 4e-6 of the typical "
    "value for one sum, and the errors of a handful of layers add in quadrature; atol covers "
    "gradients that are exactly zero in theory (the key bias of attention) and rounding in fact",
)

FP32_OTHER_DEVICE = Tolerance(
    "FP32_OTHER_DEVICE",
    rtol=4e-5,
    atol=4e-7,
    reason="as FP32_REORDERED_SUM, and functions that a GPU approximates: rsqrt, exp2, divisions "
    "of Triton's kernels are within 2 ulp (4 u), and attention in fp32 makes a product of three "
    "in TF32, within 2^-21 (8 u). Unlike rounding, such an error has one sign in all elements, so "
    "those of the 10 successive functions of two layers add: 120 u forward, twice that backward, "
    "360 u = 2e-5 beside the 1e-5 of sums. A product in TF32 alone would be 5e-4 away",
)

FP32_AFTER_OPTIMIZER = Tolerance(
    "FP32_AFTER_OPTIMIZER",
    rtol=1e-5,
    atol=1e-6,
    reason="Adam divides the gradient by its own size plus epsilon, so where a gradient is zero up "
    "to rounding (u times its terms of 1e-2: 6e-10) the weight moves by lr * 6e-10 / epsilon: "
    "6e-8 a step with lr 1e-3 and epsilon 1e-5, 3e-7 over 5 steps. Tests must not use an epsilon "
    "of 1e-8, with which that error is a large part of lr",
)

FP32_AFTER_MUON = Tolerance(
    "FP32_AFTER_MUON",
    rtol=1e-4,
    atol=1e-7,
    reason="each of the five Newton-Schulz steps makes small singular values 3.4 times as large, "
    "so a direction in which the gradient is but rounding (u) is 3.4^5 u = 3e-5 of the update: "
    "6e-5 after two updates. In fp64 the same runs agree to FP64_REORDERED_SUM",
)

FP32_AFTER_16_BIT_MOMENTS = Tolerance(
    "FP32_AFTER_16_BIT_MOMENTS",
    rtol=1e-4,
    atol=1e-7,
    reason="a moment that two runs compute with other roundings (u = 2^-24) is in a few of its "
    "elements rounded to neighbouring bf16 values, 2^-8 apart: such a weight of 0.02 moves by "
    "lr * 2^-8 = 4e-6, 2e-4 of it. With fp32 moments the same runs agree to FP32_REORDERED_SUM",
)

FP64_REORDERED_SUM = Tolerance(
    "FP64_REORDERED_SUM",
    rtol=1e-10,
    atol=1e-12,
    reason="as FP32_REORDERED_SUM, with u = 2^-53: 1e-14 of the typical value for a handful of "
    "layers; a thousand times that, for norms and ratios whose terms cancel",
)

FP64_AFTER_OPTIMIZER = Tolerance(
    "FP64_AFTER_OPTIMIZER",
    rtol=1e-9,
    atol=1e-9,
    reason="as FP32_AFTER_OPTIMIZER, with u = 2^-53: a gradient that is zero up to 1e-18 moves its "
    "weight by lr * 1e-18 / epsilon, 1e-13 with lr 1e-2 and epsilon 1e-7",
)

BF16_ROUNDED_ONCE = Tolerance(
    "BF16_ROUNDED_ONCE",
    rtol=2.0**-8,
    atol=1e-6,
    reason="the same number computed in fp32 twice, each rounded to bf16 at the end: 2 u",
)

BF16_TRUNCATED = Tolerance(
    "BF16_TRUNCATED",
    rtol=2.0**-7,
    atol=1e-6,
    reason="the same number computed in fp32 twice, one rounded to bf16 by Triton's interpreter, "
    "which cuts the lower bits off where hardware rounds to nearest: 4 u",
)

BF16_REORDERED_SUM = Tolerance(
    "BF16_REORDERED_SUM",
    rtol=2.0**-6,
    atol=1e-4,
    reason="fp32 accumulation, but partial sums of the ranks are rounded to bf16 before they are "
    "added: tp <= 8 roundings of u each, in quadrature below 8 u in nearly every element",
)

BF16_WHOLE_MODEL = Tolerance(
    "BF16_WHOLE_MODEL",
    rtol=6e-2,
    atol=1e-3,
    reason="every activation of about 10 successive operations is rounded to bf16; a random walk "
    "of 10 steps of u has a deviation of 6e-3, and the maximum over 1e6 elements is at five "
    "deviations; backward doubles the length of the chain",
)

FP16_WHOLE_MODEL = Tolerance(
    "FP16_WHOLE_MODEL",
    rtol=1e-2,
    atol=1e-3,
    reason="as BF16_WHOLE_MODEL with three more bits in the significand: u is 2^-12, not 2^-9",
)

TOLERANCES = {
    tolerance.name: tolerance
    for tolerance in (
        EXACT,
        FP32_ROUNDED_ONCE,
        FP32_REORDERED_SUM,
        FP32_OTHER_DEVICE,
        FP32_AFTER_OPTIMIZER,
        FP32_AFTER_MUON,
        FP32_AFTER_16_BIT_MOMENTS,
        FP64_REORDERED_SUM,
        FP64_AFTER_OPTIMIZER,
        BF16_ROUNDED_ONCE,
        BF16_TRUNCATED,
        BF16_REORDERED_SUM,
        BF16_WHOLE_MODEL,
        FP16_WHOLE_MODEL,
    )
}
"""All named tolerances, for tables and documents."""


def relative_error(actual: Any, expected: Any) -> float:
    """Return the largest |actual - expected| / max(|expected|, rms): what `rtol` bounds."""
    a, e = _as_float64(actual), _as_float64(expected)
    if e.numel() == 0:
        return 0.0
    error = _absolute_error(a, e)
    scale = torch.maximum(e.nan_to_num().abs(), _rms(e))
    return float(torch.where(error == 0, error, error / scale).max())


def assert_close(actual: Any, expected: Any, tolerance: Tolerance, what: str) -> None:
    """Fail unless every element of `actual` is within `tolerance` of `expected`.

    Args:
        actual, expected: tensors or numbers of equal shape; dtypes may differ, except for `EXACT`.
        what: named in the message, for example "gradient of linear_fc1.weight".
    """
    exact = tolerance is EXACT
    if exact and isinstance(actual, Tensor) and isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    a, e = _as_float64(actual), _as_float64(expected)
    assert a.shape == e.shape, f"{what}: shape {tuple(a.shape)} != {tuple(e.shape)}"
    if a.numel() == 0:
        return
    error = _absolute_error(a, e)
    allowed = tolerance.atol + tolerance.rtol * torch.maximum(e.nan_to_num().abs(), _rms(e))
    wrong = error > allowed
    if not wrong.any():
        return
    worst = int((error - allowed).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {a.numel()} elements are outside {tolerance.name} "
        f"(rtol {tolerance.rtol:.1e}, atol {tolerance.atol:.1e})\n"
        f"  worst at {place}: {float(a.flatten()[worst])!r} instead of "
        f"{float(e.flatten()[worst])!r}\n"
        f"  max error {float(error.max()):.3e}, max relative error {relative_error(a, e):.3e}, "
        f"rms of the expected {float(_rms(e)):.3e}"
    )


ROUNDING_LUCK = 2.0
"""How much farther from the exact values one of two equally accurate fp32 computations may be: the
largest errors of two samples of some 1e5 logits, drawn from one distribution, differ by less."""


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """Return the largest |actual - exact| over the largest |exact|."""
    a, e = _as_float64(actual), _as_float64(exact)
    return float(_absolute_error(a, e).max() / e.abs().max())


def assert_as_accurate(actual: Tensor, other: Tensor, exact: Tensor, what: str) -> None:
    """Fail unless `actual` is as near to the exact values as another fp32 computation of them.

    For models of many layers, where a bound from rounding arguments would be either too tight for
    one logit of a million or too wide for a wrong one: the yardstick is what fp32 itself loses in
    an implementation that nobody doubts.

    Args:
        other: of that implementation, in fp32.
        exact: in fp64.
    """
    ours, theirs = largest_error(actual, exact), largest_error(other, exact)
    assert ours <= ROUNDING_LUCK * theirs, (
        f"{what}: {ours:.2e} of the largest from the values in fp64; another implementation in fp32"
        f" is {theirs:.2e} away"
    )


def _absolute_error(a: Tensor, e: Tensor) -> Tensor:
    """Elementwise |a - e|; a non-finite value is infinitely far from all but itself."""
    error = torch.where(a.isfinite() & e.isfinite(), (a - e).abs(), torch.inf)
    return torch.where((a == e) | (a.isnan() & e.isnan()), 0.0, error)


def _as_float64(value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    return tensor.detach().to(device="cpu", dtype=torch.float64)


def _rms(tensor: Tensor) -> Tensor:
    finite = tensor[tensor.isfinite()]
    return finite.square().mean().sqrt() if finite.numel() else tensor.new_zeros(())
