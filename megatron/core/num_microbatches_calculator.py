"""Number of micro batches of the current global batch; constant, or ramped up.

As in Megatron, functions use the calculator of the process, a global variable; the classes below
can be used without it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.settings.batch_size_phases import Phases, parse_phases, size_in_phases

_LOG = logging.getLogger(__name__)


class NumMicroBatchesCalculator(ABC):
    """Number of micro batches of the step that begins after some consumed samples."""

    def __init__(
        self,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int = 0,
    ) -> None:
        self.rank = rank
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.num_micro_batches = 0
        self.current_global_batch_size = 0
        """Planned samples of a step."""
        self.current_running_global_batch_size = 0
        """Trained samples of a step: smaller if the plan was rounded down."""

    @property
    def samples_at_once(self) -> int:
        """Samples of one micro batch of all replicas: every global batch is a multiple."""
        return self.micro_batch_size * self.data_parallel_size

    def get(self) -> int:
        """Return the number of micro batches of each replica."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Return the planned samples of a step."""
        return self.current_global_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Return the actual samples of a step."""
        return self.current_running_global_batch_size

    def get_micro_batch_size(self) -> int:
        """Return the samples of one micro batch of one replica."""
        return self.micro_batch_size

    @abstractmethod
    def planned(self, consumed_samples: int) -> int:
        """Return the global batch size of the step after `consumed_samples`."""

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Set the batch for the step after `consumed_samples`.

        Args:
            consistency_check: refuse a batch that the replicas cannot share evenly; without it
                the batch is rounded down.
        """
        planned, before = self.planned(consumed_samples), self.current_global_batch_size
        number = planned // self.samples_at_once
        if number == 0 or (consistency_check and not self.decrease_batch_size_if_needed):
            found = _check_division(planned, self.samples_at_once, "the batch of this step")
            raise_together(found, summary="the batch size")
        self.num_micro_batches, self.current_global_batch_size = number, planned
        self.current_running_global_batch_size = number * self.samples_at_once
        if verbose and self.rank == 0 and planned != before:
            _LOG.info("global batch size is now %d (was %d)", planned, before)


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The same global batch in every step."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
        rank: int = 0,
    ) -> None:
        """
        Raises:
            ConfigError: the replicas cannot share the batch.
        """
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
        problems = _check_positive(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_parallel_size=data_parallel_size,
        )
        if not problems:
            at_once = self.samples_at_once
            if not decrease_batch_size_if_needed or global_batch_size < at_once:
                problems += _check_division(global_batch_size, at_once, "global-batch-size")
        raise_together(problems, summary="the batch size")
        self.global_batch_size = global_batch_size
        self.update(0, consistency_check=False)
        if rank == 0 and self.current_running_global_batch_size != global_batch_size:
            _LOG.info(
                "global batch of %d samples decreased to %d, a multiple of %d",
                global_batch_size,
                self.current_running_global_batch_size,
                self.samples_at_once,
            )

    def planned(self, consumed_samples: int) -> int:
        """Return the constant size."""
        return self.global_batch_size


class RampupBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The global batch grows in equal steps while a number of samples is consumed."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        start_global_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
    ) -> None:
        """
        Args:
            start_global_batch_size: samples of the first step.
            batch_size_increment: samples that each growth adds, up to `global_batch_size`.
            ramup_samples: samples until the full size is reached.
        Raises:
            ConfigError: all contradictions together.
        """
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        self.global_batch_size = global_batch_size
        self.start_global_batch_size = start_global_batch_size
        self.batch_size_increment = batch_size_increment
        self.ramup_samples = ramup_samples
        raise_together(self._check(), summary="the batch size ramp")
        num_increments = (global_batch_size - start_global_batch_size) // batch_size_increment
        self.rampup_samples_per_increment = ramup_samples / max(num_increments, 1)
        self.update(0, consistency_check=False)

    def _check(self) -> Iterator[MegatronError]:
        problems = _check_positive(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            data_parallel_size=self.data_parallel_size,
            start_batch_size=self.start_global_batch_size,
            batch_size_increment=self.batch_size_increment,
        )
        if problems:
            yield from problems
            return
        growth = self.global_batch_size - self.start_global_batch_size
        if growth < 0 or growth % self.batch_size_increment:
            yield ConfigError(
                f"a batch of {self.start_global_batch_size} samples does not reach"
                f" {self.global_batch_size} in steps of {self.batch_size_increment}.",
                rule="the difference is a multiple of the increment",
                flags=["--rampup-batch-size", "--global-batch-size"],
                fix=f"use the increment {max(abs(growth), 1)}, or one that divides it",
            )
        if self.ramup_samples < 0:
            yield ConfigError(
                f"a ramp over {self.ramup_samples} samples.",
                rule="the length of a ramp is not negative",
                flags=["--rampup-batch-size"],
                fix="drop --rampup-batch-size",
            )
        if not self.decrease_batch_size_if_needed:
            at_once = self.samples_at_once
            for name, value in (
                ("the full batch", self.global_batch_size),
                ("the first batch of the ramp", self.start_global_batch_size),
                ("the increment of the ramp", self.batch_size_increment),
            ):
                yield from _check_division(value, at_once, name)

    def planned(self, consumed_samples: int) -> int:
        """Return the size that the ramp has reached."""
        if consumed_samples > self.ramup_samples or self.rampup_samples_per_increment <= 0:
            return self.global_batch_size
        steps = int(consumed_samples / self.rampup_samples_per_increment)
        planned = self.start_global_batch_size + steps * self.batch_size_increment
        return min(planned, self.global_batch_size)


class StepBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The global batch changes at given numbers of consumed samples."""

    def __init__(
        self,
        phases: Phases,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
    ) -> None:
        """
        Args:
            phases: result of `parse_phases`.
        Raises:
            ConfigError: the replicas cannot share one of the batches.
        """
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
        self.phases = phases
        problems = _check_positive(
            micro_batch_size=micro_batch_size, data_parallel_size=data_parallel_size
        )
        for _, size in () if problems else phases:
            if not decrease_batch_size_if_needed or size < self.samples_at_once:
                problems += _check_division(size, self.samples_at_once, "a batch of the schedule")
        raise_together(problems, summary="the batch size schedule")
        self.update(0, consistency_check=False)

    def planned(self, consumed_samples: int) -> int:
        """Return the size of the phase."""
        return size_in_phases(consumed_samples, self.phases)


def _check_positive(**sizes: int) -> list[MegatronError]:
    flags = {
        "global_batch_size": "--global-batch-size",
        "micro_batch_size": "--micro-batch-size",
        "data_parallel_size": "--nproc-per-node",
    }
    return [
        ConfigError(
            f"{name}={value}.",
            rule=f"{name} is at least 1",
            flags=[flags.get(name, "--rampup-batch-size")],
            fix="use a positive number",
        )
        for name, value in sizes.items()
        if value is None or value < 1
    ]


def _check_division(batch: int, samples_at_once: int, what: str) -> list[MegatronError]:
    if batch % samples_at_once == 0 and batch > 0:
        return []
    lower = batch // samples_at_once * samples_at_once
    choices = [str(n) for n in (lower, lower + samples_at_once) if n > 0]
    return [
        ConfigError(
            f"{what} of {batch} samples is not a multiple of {samples_at_once} = micro-batch-size *"
            " data-parallel size.",
            rule="every replica runs the same number of whole micro batches",
            flags=["--global-batch-size", "--micro-batch-size", "--decrease-batch-size-if-needed"],
            fix=f"use {' or '.join(choices)}",
        )
    ]


# The calculator of this process -------------------------------------------------------------

_calculator: NumMicroBatchesCalculator | None = None


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatchesCalculator:
    """Return a constant calculator, a ramp for `rampup_batch_size` = [start, increment, samples],
    or the phases of `step_batch_size_schedule`, see `parse_phases`."""
    if step_batch_size_schedule is not None:
        try:
            phases = parse_phases(step_batch_size_schedule, seq_length or 1)
        except ValueError as reason:
            raise ConfigError(
                f"step_batch_size_schedule {step_batch_size_schedule!r} {reason}.",
                rule="pairs TOKENS:SIZE, from 0 tokens on, separated by blanks",
                flags=["--step-batch-size-schedule"],
                fix='for example --step-batch-size-schedule "0:16 1B:32"',
            ) from None
        return StepBatchsizeNumMicroBatchesCalculator(
            phases, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
        )
    if rampup_batch_size is None:
        return ConstantNumMicroBatchesCalculator(
            global_batch_size,
            micro_batch_size,
            data_parallel_size,
            decrease_batch_size_if_needed,
            rank,
        )
    if len(rampup_batch_size) != 3:
        raise ConfigError(
            f"rampup_batch_size={list(rampup_batch_size)}.",
            rule="a ramp is given as start batch size, increment, samples",
            flags=["--rampup-batch-size"],
            fix="for example --rampup-batch-size 16 16 100000",
        )
    start, increment, samples = (int(value) for value in rampup_batch_size)
    return RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        rank,
        start,
        increment,
        samples,
    )


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Create the calculator of this process.

    Raises:
        ConfigError: sizes that do not fit together, or a calculator that exists already.
    """
    if _calculator is not None:
        raise ConfigError(
            "the micro batch calculator of this process exists already.",
            rule="a process trains one run at a time",
            fix="call destroy_num_microbatches_calculator() first, or reconfigure it",
        )
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Create or replace the calculator of this process."""
    global _calculator
    _calculator = build_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size or 0,
        micro_batch_size or 0,
        data_parallel_size or 0,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length,
    )


def destroy_num_microbatches_calculator() -> None:
    """Remove the calculator of this process."""
    global _calculator
    _calculator = None


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def _current() -> NumMicroBatchesCalculator:
    if _calculator is None:
        raise ConfigError(
            "the number of micro batches was read before it was set.",
            rule="the batch sizes of a process are set once, before its first step",
            fix="call init_num_microbatches_calculator() first",
        )
    return _calculator


def get_num_microbatches() -> int:
    """Return the number of micro batches of each replica in the present step."""
    return _current().get()


def get_current_global_batch_size() -> int:
    """Return the planned samples of the present step."""
    return _current().get_current_global_batch_size()


def get_current_running_global_batch_size() -> int:
    """Return the actual samples of the present step."""
    return _current().get_current_running_global_batch_size()


def get_micro_batch_size() -> int:
    """Return the samples of one micro batch of one replica."""
    return _current().get_micro_batch_size()


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Set the batch for the step after `consumed_samples`."""
    _current().update(consumed_samples, consistency_check, verbose)
