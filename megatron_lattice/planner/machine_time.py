"""Seconds of a step on a machine without accelerators, from the program and a short measurement.

The work of a rank is counted in its imaginary step (`tracing.work`). Its operations are timed here,
each by itself; what they take in a run, and what a call of Python and a message take, is fitted to
a few measured layouts of the same machine, not negative and in relative error. Ranks share the
cores: a step takes the pipeline's makespan, or all work over the cores if that is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.simulate import Costs
from megatron.core.pipeline_parallel.step_plan import plan_report
from megatron.training.config.resolved import ResolvedRun
from megatron_lattice.planner.predictor import NINE_TENTHS
from megatron_lattice.planner.work import OperationTimes, WorkOfRank
from megatron_lattice.planner.workload import FloatArray

_NUM_ROUNDS = 400
_DISTURBED = 0.1
"""Relative error from which on a step is rather taken to have been disturbed."""
_SHARING = np.linspace(1.0, 1.6, 25)
_USUAL_SHARING, _SHARING_WIDTH = 1.15, 0.15
"""What is expected before a run was measured, and how far from it a machine may well be."""
TERMS = ("operation_seconds", "num_calls", "num_messages", "message_bytes")
_USUAL = np.array([1.2, 6.5e-7, 3e-4, 6.5e-10])
"""Seconds of one unit of each term on a core of a server of 2023."""
_USUAL_WIDTH = 0.5
"""How far from it a machine may well be, over it: few runs do not tell the terms apart."""
_SLOWED = np.array([True, True, False, False])
"""The terms that take longer beside other ranks."""


@dataclass(frozen=True)
class StepWork:
    """What a step of a layout does.

    Attributes:
        terms: [ranks, terms], see `WorkOfRank`; the operations by what they take alone.
        stretch: makespan of the pipeline over the work of a rank: 1 without a pipeline.
        cores: of the machine that the ranks share.
    """

    terms: FloatArray
    stretch: float
    cores: int

    def waited_for(self, sharing: float = 1.0) -> FloatArray:
        """Return the terms that a step waits for, [terms].

        Args:
            sharing: what the work of a rank takes beside other ranks, over what it takes alone.
        """
        num_ranks = len(self.terms)
        crowding = max(1.0, num_ranks / self.cores)
        # Cores that are shared let stages wait less, but no more than if they alone made it last:
        # between the larger of both and their product.
        factor = np.sqrt(self.stretch**2 + crowding**2 - 1)
        slower = np.where(_SLOWED & (num_ranks > 1), sharing, 1.0)
        return np.asarray(self.terms.mean(axis=0) * factor * slower)


def work_of_step(
    run: ResolvedRun, works: Sequence[WorkOfRank], cores: int, times: OperationTimes
) -> StepWork:
    """Return the work of a step of a run.

    Args:
        works: of all ranks, from `work_of_ranks`.
        times: of the operations of this machine, of earlier runs as well.
    """
    terms = np.array([_terms(work, times) for work in works])
    return StepWork(terms, _stretch(run, run.parallelism.pipeline_model_parallel_size), cores)


def _terms(work: WorkOfRank, times: OperationTimes) -> tuple[float, ...]:
    return times.seconds_of_work(work), work.num_calls, work.num_messages, work.message_bytes


def _stretch(run: ResolvedRun, stages: int) -> float:
    if stages == 1:
        return 1.0
    sizes, config = run.parallelism, run.transformer_config
    model = sizes.tensor_model_parallel_size * stages * sizes.context_parallel_size
    data = run.topology.world_size // model
    number = run.schedule.global_batch_size // (data * run.schedule.micro_batch_size)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    schedule = config.pipeline_schedule
    plan = StepPlan(schedule, stages, chunks, number)
    report = plan_report(plan, Costs(forward=1.0, backward=2.0))
    return report.makespan / (3.0 * number * chunks)


@dataclass(frozen=True)
class MachineTime:
    """What a unit of work takes on a machine.

    Attributes:
        seconds_of: of one unit of each of `TERMS`.
        sharing: what work takes beside other ranks, over what it takes alone.
        deviation: of the logarithm of measured over predicted seconds, in the calibration.
    """

    seconds_of: FloatArray
    sharing: float
    deviation: float

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step.

        Raises:
            ConfigError: it sends messages, and the measured runs have not.
        """
        terms, messages = work.waited_for(self.sharing), TERMS.index("num_messages")
        if terms[messages] and not self.seconds_of[messages]:
            raise ConfigError(
                "the measured runs sent no messages, and this one does.",
                rule="what a message takes here is known from runs that sent some",
                flags=["--calibrate"],
                fix="measure a run of several ranks as well",
            )
        return float(terms @ self.seconds_of)

    def interval(self, work: StepWork) -> tuple[float, float]:
        """Return what nine of ten steps are between, by the residuals of the calibration."""
        middle, factor = self.seconds(work), float(np.exp(NINE_TENTHS * self.deviation))
        return middle / factor, middle * factor


def fit_machine_time(works: Sequence[StepWork], seconds: Sequence[float]) -> MachineTime:
    """Fit to measured steps of one machine: the likeliest of several values of `sharing`."""
    measured = np.array(seconds)
    found: list[tuple[float, MachineTime]] = []
    for sharing in _SHARING:
        terms = np.array([work.waited_for(sharing) for work in works])
        seconds_of = _fit_units(terms, measured)
        errors = (terms @ seconds_of) / measured - 1
        unlikely = np.log1p((errors / _DISTURBED) ** 2).sum()
        unlikely += ((sharing - _USUAL_SHARING) / _SHARING_WIDTH) ** 2
        deviation = float(np.sqrt(np.mean(np.log1p(errors) ** 2)))
        found.append((float(unlikely), MachineTime(seconds_of, float(sharing), deviation)))
    return min(found, key=lambda each: each[0])[1]


def _fit_units(terms: FloatArray, measured: FloatArray) -> FloatArray:
    """Return the seconds of one unit of each term.

    Least squares of the relative error with factors that are not negative, by multiplicative
    updates (Lee and Seung, "Learning the parts of objects by non-negative matrix factorization",
    Nature 401, 1999), from equal shares of each kind of work on.

    Each factor is drawn towards what is usual as if one more run had measured it; then all of them
    are scaled, so that a machine that is slower than usual is not taken for one that is less so.

    Args:
        terms: [runs, terms].
        measured: [runs], in seconds.
    """
    relative = terms / measured[:, None]
    scale = np.maximum(relative.mean(axis=0), 1e-300)
    scaled = relative / scale
    # Of work that no run has done nothing is said: it keeps the price 0.
    usual = np.where(relative.any(axis=0), scale * _USUAL, np.inf)
    drawn = (_DISTURBED / _USUAL_WIDTH) ** 2 / usual
    factors = np.full(len(scale), 1 / len(scale))
    ones = np.ones(len(measured))
    for _ in range(_NUM_ROUNDS):
        predicted = scaled @ factors
        # Robust: a step that was disturbed counts less.
        weight = 1 / (1 + ((predicted - 1) / _DISTURBED) ** 2)
        wanted = scaled.T @ (weight * predicted) + drawn * factors / usual
        factors *= (scaled.T @ (weight * ones) + drawn) / np.maximum(wanted, 1e-300)
    predicted = scaled @ factors
    weight = 1 / (1 + ((predicted / np.median(predicted) - 1) / _DISTURBED) ** 2)
    return factors / scale * (weight @ predicted) / (weight @ predicted**2)
