"""Weight gradients that wait: the second half of a backward pass cut in two.

Within `weight_gradients_may_wait` linear layers are run so that their weight gradient can be
formed apart from their input gradient. A backward pass inside `collecting` puts the products off
as calls, which the caller runs later, in order. Everything else (biases, norms, embeddings, heads
with a fused loss) is cheap or inseparable and is finished in the first half.

"Zero Bubble Pipeline Parallelism", section 1, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

WeightGradient = Callable[[], None]
"""Forms one weight gradient and adds it where it belongs."""

_may_wait = False
_collected: list[WeightGradient] | None = None


@contextmanager
def weight_gradients_may_wait() -> Iterator[None]:
    """Around the forward and backward passes of a step that splits backwards."""
    global _may_wait
    before, _may_wait = _may_wait, True
    try:
        yield
    finally:
        _may_wait = before


def may_wait() -> bool:
    """Return whether layers should be ready to put weight gradients off."""
    return _may_wait


@contextmanager
def collecting(calls: list[WeightGradient]) -> Iterator[None]:
    """Around a backward pass: append to `calls` what it leaves to be done."""
    global _collected
    before, _collected = _collected, calls
    try:
        yield
    finally:
        _collected = before


def put_off(call: WeightGradient) -> bool:
    """Leave a weight gradient for later; False if it has to be formed now."""
    if _collected is None:
        return False
    _collected.append(call)
    return True
