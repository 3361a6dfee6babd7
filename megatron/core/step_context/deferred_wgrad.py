"""Deferred weight gradients: the second half of a backward pass that is split in two.

Within `enable_wgrad_deferral` linear layers run so that their weight gradient can be computed apart
from their input gradient. A backward pass inside `capture_wgrads` appends the weight gradients as
calls, which the caller runs later, in order. Everything else (biases, norms, embeddings, heads
with a fused loss) is cheap or inseparable and is computed in the first half.

"Zero Bubble Pipeline Parallelism", section 1, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

WeightGradient = Callable[[], None]
"""Computes one weight gradient and adds it to the parameter's."""

_is_enabled = False
_captured: list[WeightGradient] | None = None


@contextmanager
def enable_wgrad_deferral() -> Iterator[None]:
    """Around the forward and backward passes of a step that splits backwards."""
    global _is_enabled
    before, _is_enabled = _is_enabled, True
    try:
        yield
    finally:
        _is_enabled = before


def wgrad_deferral_enabled() -> bool:
    """Return whether layers should be ready to defer weight gradients."""
    return _is_enabled


@contextmanager
def capture_wgrads(calls: list[WeightGradient]) -> Iterator[None]:
    """Around a backward pass: append the weight gradients that it defers to `calls`."""
    global _captured
    before, _captured = _captured, calls
    try:
        yield
    finally:
        _captured = before


def defer_wgrad(call: WeightGradient) -> bool:
    """Defer a weight gradient; False if it has to be computed now."""
    if _captured is None:
        return False
    _captured.append(call)
    return True
