"""Batch sizes: derive the third of three numbers from two, and explain numbers that conflict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, ACCUMULATION)
DEFAULT = "the default"
"""Source of a number that neither a key nor other numbers determine."""


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step: train = micro x accumulation x replicas."""

    train: int
    micro: int
    accumulation: int
    replicas: int
    sources: Mapping[str, str]
    """Key -> source of its number."""

    def describe(self) -> str:
        """Return the equation with the source of each number, one line each."""
        numbers = {TRAIN: self.train, MICRO: self.micro, ACCUMULATION: self.accumulation}
        lines = [f"{self.train} = {self.micro} x {self.accumulation} x {self.replicas} replicas"]
        lines += [f"{key} {number}: {self.sources[key]}" for key, number in numbers.items()]
        return "\n".join(lines)


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, *, replicas: int
) -> BatchSizes:
    """Derive the missing numbers.

    Args:
        train: samples of an optimizer step over all ranks.
        micro: samples of a forward pass of one rank.
        accumulation: forward passes of a step.
        replicas: data-parallel ranks.
    Raises:
        ConfigError: the numbers conflict; the message has the equation and numbers that fit.
    """
    given = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    sources = {key: "given" for key, value in given.items() if value is not None}
    if train is None:
        if micro is None:
            micro, sources[MICRO] = 1, DEFAULT
        if accumulation is None:
            accumulation, sources[ACCUMULATION] = 1, DEFAULT
        train = micro * accumulation * replicas
        sources[TRAIN] = f"{MICRO} x {ACCUMULATION} x {replicas} replicas"
    elif micro is None and accumulation is None:
        accumulation, sources[ACCUMULATION] = 1, DEFAULT
        micro, sources[MICRO] = train // replicas, f"{TRAIN} / {replicas} replicas"
    elif micro is None:
        assert accumulation is not None
        micro = train // (accumulation * replicas)
        sources[MICRO] = f"{TRAIN} / ({ACCUMULATION} x {replicas} replicas)"
    elif accumulation is None:
        accumulation = train // (micro * replicas)
        sources[ACCUMULATION] = f"{TRAIN} / ({MICRO} x {replicas} replicas)"
    if train != micro * accumulation * replicas:
        raise _misfit(train, given, replicas)
    return BatchSizes(train, micro, accumulation, replicas, sources)


def _misfit(train: int, given: Mapping[str, int | None], replicas: int) -> ConfigError:
    factors = {key: value for key, value in given.items() if key != TRAIN and value is not None}
    unit = replicas
    for value in factors.values():
        unit *= value
    said = " x ".join(
        [*(f"{key} {value}" for key, value in factors.items()), f"{replicas} replicas"]
    )
    if len(factors) == 2:
        found = f"{TRAIN} {train} is not {said} = {unit}."
        fix = f"use {TRAIN} {unit}, or drop one of the three keys"
    else:
        found = f"{TRAIN} {train} cannot be divided by {said} = {unit}."
        below, above = train // unit * unit, -(-train // unit) * unit
        fix = f"use {TRAIN} " + (f"{below} or {above}" if below else f"{above}")
    return ConfigError(
        found,
        rule=f"{TRAIN} = {MICRO} x {ACCUMULATION} x data-parallel replicas",
        flags=list(KEYS),
        fix=fix,
    )
