"""Derive batch sizes, the length of a run, and the lengths of schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megatron.core.settings.batch_size_phases import (
    parse_phases,
    samples_in_phases,
    steps_in_phases,
)
from megatron.training.config.resolved import Draft


def batch_size_at(consumed_samples: int, ramp: Sequence[int] | None, full_size: int) -> int:
    """Return the global batch size of the step that begins after `consumed_samples`.

    Args:
        ramp: start size, increment, and number of samples until `full_size`; each size lasts for
            the same number of samples. None keeps the size constant.
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


def resolve_batch(draft: Draft) -> None:
    """Derive the batch size, and the length of the run in steps and in samples."""
    asked, seq_length = draft.run.schedule, draft.run.model.seq_length
    phases = None
    if asked.step_batch_size_schedule is not None and seq_length:
        with contextlib.suppress(ValueError):  # a rule reports it
            phases = parse_phases(asked.step_batch_size_schedule, seq_length)
    micro, dp = asked.micro_batch_size, draft.run.topology.data_parallel_size
    size, ramp = asked.global_batch_size, asked.rampup_batch_size
    if size is None and phases:
        size = phases[-1][1]
        draft.set("last size of --step-batch-size-schedule", global_batch_size=size)
    if size is None and micro:
        size = micro * dp
        draft.set(f"micro batch {micro} * {dp} replicas", global_batch_size=size)
    if asked.decrease_batch_size_if_needed and size and micro and size >= micro * dp:
        formula = f"{size} rounded down to a multiple of {micro * dp}"
        size = size // (micro * dp) * micro * dp
        draft.set(formula, global_batch_size=size)
    draft.set(is_sample_based=asked.train_samples is not None)
    if not size or size <= 0 or (ramp is not None and (min(ramp) <= 0 or ramp[0] > size)):
        return
    iters, samples = asked.train_iters, asked.train_samples
    sizes = f"{size} samples"
    if phases:
        sizes = "the sizes of --step-batch-size-schedule"
    elif ramp is not None:
        sizes = f"the sizes of --rampup-batch-size, up to {size} samples"
    if iters is None and samples is not None:
        iters = (
            steps_in_phases(samples, phases) if phases else steps_for_samples(samples, ramp, size)
        )
        draft.set(f"{samples} samples in steps of {sizes}", train_iters=iters)
    elif samples is None and iters is not None:
        samples = (
            samples_in_phases(iters, phases) if phases else samples_for_steps(iters, ramp, size)
        )
        draft.set(f"{iters} steps of {sizes}", train_samples=samples)


def resolve_lengths(draft: Draft) -> None:
    """Convert the lengths of schedules to samples, so that batch size ramps do not distort them."""
    asked = draft.run.schedule
    size = asked.global_batch_size or 0
    if asked.is_sample_based:
        decay = asked.lr_decay_samples or asked.train_samples or 0
        warmup, wsd = asked.lr_warmup_samples, asked.lr_wsd_decay_samples
        unit = "samples"
    else:
        decay = (asked.lr_decay_iters or asked.train_iters or 0) * size
        warmup = asked.lr_warmup_iters * size
        wsd = asked.lr_wsd_decay_iters * size if asked.lr_wsd_decay_iters is not None else None
        unit = f"steps * {size} samples"
    draft.note("lr_decay_steps", decay, f"decay length in samples, from {unit}")
    if asked.lr_warmup_fraction is not None:
        warmup = int(asked.lr_warmup_fraction * decay)
        draft.note("lr_warmup_steps", warmup, f"{asked.lr_warmup_fraction} of the decay length")
    style = draft.run.optimizer.weight_decay_incr_style
    draft.set(
        lr_decay_steps=decay,
        lr_warmup_steps=warmup,
        wsd_decay_steps=wsd,
        wd_incr_steps=(asked.train_samples or 0) if style != "constant" else 0,
    )
