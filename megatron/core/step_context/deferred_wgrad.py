"""Deferred weight gradients: the second half of a backward pass that is split in two.

Within `enable_wgrad_deferral` linear layers can compute their weight gradient separately from their
input gradient. A backward pass inside `capture_wgrads` appends the weight gradients as
calls, which the caller runs later, in order. Everything else (biases, norms, embeddings, heads
with a fused loss) is cheap or inseparable and is computed in the first half.

"Zero Bubble Pipeline Parallelism", section 1, arXiv:2401.10241.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron.core.step_context.context import WeightGradient, current_step, within_step


def enable_wgrad_deferral() -> AbstractContextManager[None]:
    """Around the forward and backward passes of a step that splits backwards."""
    return within_step(defers_wgrads=True)


def wgrad_deferral_enabled() -> bool:
    """Return whether layers should be ready to defer weight gradients."""
    return current_step().defers_wgrads


def capture_wgrads(calls: list[WeightGradient]) -> AbstractContextManager[None]:
    """Around a backward pass: append the weight gradients that it defers to `calls`."""
    return within_step(captured_wgrads=calls)


def defer_wgrad(call: WeightGradient) -> bool:
    """Defer a weight gradient; False if it has to be computed now."""
    captured = current_step().captured_wgrads
    if captured is None:
        return False
    captured.append(call)
    return True
