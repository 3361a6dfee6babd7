"""Derive batch sizes, the length of a run, and the lengths of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.core.settings.batch_size_phases import (
    Phases,
    parse_phases,
    samples_in_phases,
    steps_in_phases,
)
from megatron.training.config.batch import ScheduleSettings
from megatron.training.config.resolved import DerivationLog


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


def resolve_batch(
    asked: ScheduleSettings, seq_length: int | None, num_replicas: int, log: DerivationLog
) -> ScheduleSettings:
    micro, dp, found = asked.micro_batch_size, num_replicas, asked
    phases = batch_size_phases(asked.step_batch_size_schedule, seq_length)
    if found.global_batch_size is None and phases:
        found = log.derived(
            found,
            replace(found, global_batch_size=phases[-1][1]),
            "last size of --step-batch-size-schedule",
        )
    if found.global_batch_size is None and micro:
        found = log.derived(
            found,
            replace(found, global_batch_size=micro * dp),
            f"micro batch {micro} * {dp} replicas",
        )
    size, ramp = found.global_batch_size, found.rampup_batch_size
    if found.decrease_batch_size_if_needed and size and micro and size >= micro * dp:
        shared = size // (micro * dp) * micro * dp
        found = log.derived(
            found,
            replace(found, global_batch_size=shared),
            f"{size} rounded down to a multiple of {micro * dp}",
        )
        size = shared
    found = replace(found, is_sample_based=found.train_samples is not None)
    if not size or size <= 0:
        return found
    if ramp is not None and (min(ramp) <= 0 or ramp[0] > size):
        return found
    iters, samples = found.train_iters, found.train_samples
    sizes = f"{size} samples"
    if phases:
        sizes = "the sizes of --step-batch-size-schedule"
    elif ramp is not None:
        sizes = f"the sizes of --rampup-batch-size, up to {size} samples"
    if iters is None and samples is not None:
        iters = (
            steps_in_phases(samples, phases) if phases else steps_for_samples(samples, ramp, size)
        )
        formula = f"{samples} samples in steps of {sizes}"
    elif samples is None and iters is not None:
        samples = (
            samples_in_phases(iters, phases) if phases else samples_for_steps(iters, ramp, size)
        )
        formula = f"{iters} steps of {sizes}"
    else:
        return found
    return log.derived(found, replace(found, train_iters=iters, train_samples=samples), formula)


def batch_size_phases(text: str | None, seq_length: int | None) -> Phases | None:
    """Return the phases of --step-batch-size-schedule; None if it is missing or invalid."""
    if text is None or not seq_length:
        return None
    try:
        return parse_phases(text, seq_length)
    except ValueError:
        return None


def resolve_lengths(
    asked: ScheduleSettings, weight_decay_style: str, log: DerivationLog
) -> ScheduleSettings:
    """Convert the lengths of schedules to samples, so that batch size ramps do not distort them."""
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
    log.note("lr_decay_steps", decay, f"decay length in samples, from {unit}")
    if asked.lr_warmup_fraction is not None:
        warmup = int(asked.lr_warmup_fraction * decay)
        log.note("lr_warmup_steps", warmup, f"{asked.lr_warmup_fraction} of the decay length")
    return replace(
        asked,
        lr_decay_steps=decay,
        lr_warmup_steps=warmup,
        wsd_decay_steps=wsd,
        wd_incr_steps=(asked.train_samples or 0) if weight_decay_style != "constant" else 0,
    )
