"""Arithmetic of a batch that grows at the start of training. Pure integers, no torch."""

from __future__ import annotations

from collections.abc import Sequence


def batch_size_at(consumed_samples: int, ramp: Sequence[int] | None, full_size: int) -> int:
    """Return the global batch size of the step that begins after `consumed_samples`.

    Args:
        ramp: start size, increment, and the samples over which the size grows to `full_size` in
            equal steps of samples; None means a constant batch.
    """
    if ramp is None:
        return full_size
    start, increment, ramp_samples = ramp
    if consumed_samples > ramp_samples or full_size <= start:
        return full_size
    num_increments = (full_size - start) // increment
    samples_per_increment = ramp_samples / num_increments if num_increments else ramp_samples
    reached = int(consumed_samples / samples_per_increment) if samples_per_increment else 0
    return start + min(reached, num_increments) * increment


def steps_for_samples(num_samples: int, ramp: Sequence[int] | None, full_size: int) -> int:
    """Return how many whole steps fit into `num_samples`."""
    steps = consumed = 0
    ramp_samples = ramp[2] if ramp is not None else -1
    while consumed <= ramp_samples and consumed < num_samples:
        consumed += batch_size_at(consumed, ramp, full_size)
        steps += 1
    return steps + max(num_samples - consumed, 0) // full_size


def samples_for_steps(num_steps: int, ramp: Sequence[int] | None, full_size: int) -> int:
    """Return how many samples `num_steps` steps consume."""
    steps = consumed = 0
    ramp_samples = ramp[2] if ramp is not None else -1
    while consumed <= ramp_samples and steps < num_steps:
        consumed += batch_size_at(consumed, ramp, full_size)
        steps += 1
    return consumed + (num_steps - steps) * full_size
