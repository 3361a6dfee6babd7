"""Seconds of a step on a machine without accelerators, from the program and a short measurement.

`planner.work` counts the work of a rank in a step on fake tensors. This module times each
operation alone. A fit to a few measured layouts of the same machine gives the time of the
operations within a run, of a Python call and of a message: factors are not negative, and errors are
relative. Ranks share the cores: a step lasts as long as the pipeline's makespan, or as all work
divided by the number of cores if that is longer.
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
"""A step with a larger relative error probably ran on a disturbed machine."""
_SHARING = np.linspace(1.0, 1.6, 25)
_USUAL_SHARING, _SHARING_WIDTH = 1.15, 0.15
"""Expected slowdown of a rank by the other ranks before any measurement, and its width."""
TERMS = ("operation_seconds", "num_calls", "num_messages", "message_bytes")
_USUAL = np.array([1.2, 6.5e-7, 3e-4, 6.5e-10])
"""Seconds of one unit of each term on a core of a server of 2023."""
_USUAL_WIDTH = 0.5
"""Width of the prior around `_USUAL`, in log: a few runs cannot separate the terms."""
_SLOWED = np.array([True, True, False, False])
"""Which terms take longer while other ranks run."""


@dataclass(frozen=True)
class StepWork:
    """Work of a step of a layout.

    Attributes:
        terms: [ranks, terms], see `WorkOfRank`; operations by the seconds that they take alone.
        stretch: makespan of the pipeline over the work of a rank: 1 without a pipeline.
        cores: number of cores that the ranks share.
    """

    terms: FloatArray
    stretch: float
    cores: int

    def waited_for(self, sharing: float = 1.0) -> FloatArray:
        """Return the terms on the critical path of a step, [terms].

        Args:
            sharing: slowdown of a rank's work by other ranks.
        """
        num_ranks = len(self.terms)
        crowding = max(1.0, num_ranks / self.cores)
        # If ranks share cores, stages idle less. The factor is between the larger of stretch and
        # crowding and their product.
        factor = np.sqrt(self.stretch**2 + crowding**2 - 1)
        slower = np.where(_SLOWED & (num_ranks > 1), sharing, 1.0)
        return np.asarray(self.terms.mean(axis=0) * factor * slower)


def work_of_step(
    run: ResolvedRun, works: Sequence[WorkOfRank], cores: int, times: OperationTimes
) -> StepWork:
    """Return the work of a step of a run.

    Args:
        works: of all ranks, from `work_of_ranks`.
        times: measured operations of this machine; earlier measurements may be included.
    """
    terms = np.array(
        [
            (times.seconds_of_work(work), work.num_calls, work.num_messages, work.message_bytes)
            for work in works
        ]
    )
    return StepWork(terms, _stretch(run, run.parallelism.pipeline_model_parallel_size), cores)


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
    """Seconds of a unit of work on a machine.

    Attributes:
        seconds_of: seconds of one unit of each of `TERMS`.
        sharing: slowdown of work by other ranks.
        deviation: deviation of log(measured / predicted) in the calibration.
    """

    seconds_of: FloatArray
    sharing: float
    deviation: float

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step.

        Raises:
            ConfigError: the step sends messages, and the measured runs sent none.
        """
        terms, messages = work.waited_for(self.sharing), TERMS.index("num_messages")
        if terms[messages] and not self.seconds_of[messages]:
            raise ConfigError(
                "the measured runs sent no messages, and this one does.",
                rule="the time of a message is fitted to measured runs that send messages",
                flags=["--calibrate"],
                fix="measure a run of several ranks as well",
            )
        return float(terms @ self.seconds_of)

    def interval(self, work: StepWork) -> tuple[float, float]:
        """Return the interval that contains 90 % of the steps, by the calibration's residuals."""
        middle, factor = self.seconds(work), float(np.exp(NINE_TENTHS * self.deviation))
        return middle / factor, middle * factor


def fit_machine_time(works: Sequence[StepWork], seconds: Sequence[float]) -> MachineTime:
    """Fit to measured steps of one machine; of several values of `sharing`, take the likeliest."""
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
    Nature 401, 1999). All kinds of work start with equal shares.

    The prior of each factor weighs as much as one run. It is scaled to the speed of the machine,
    so that the fit does not pull a slow machine towards the usual speed.

    Args:
        terms: [runs, terms].
        measured: [runs], in seconds.
    """
    relative = terms / measured[:, None]
    scale = np.maximum(relative.mean(axis=0), 1e-300)
    scaled = relative / scale
    # A kind of work that no run contains keeps the price 0.
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
