"""Seconds of a step on a machine without accelerators, from the program and a short measurement.

The work of a rank is counted in its imaginary step (`tracing.work`); what a unit of work takes is
fitted to a few measured layouts of the same machine, not negative and in relative error. Ranks
share the cores: a step takes the pipeline's makespan, or all work over the cores if that is more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.simulate import Costs
from megatron.core.pipeline_parallel.step_plan import plan_report
from megatron.planner.predictor import NINE_TENTHS
from megatron.planner.program_memory import work_of_rank
from megatron.planner.tracing.rank_step import ModelScript
from megatron.planner.tracing.work import WorkOfRank
from megatron.planner.workload import FloatArray
from megatron.training.config.resolved import ResolvedRun

_NUM_ROUNDS = 400
TERMS = tuple(field.name for field in dataclasses.fields(WorkOfRank))


@dataclass(frozen=True)
class StepWork:
    """What a step of a layout does.

    Attributes:
        terms: [ranks, terms], see `WorkOfRank`.
        stretch: makespan of the pipeline over the work of a rank: 1 without a pipeline.
        cores: of the machine that the ranks share.
    """

    terms: FloatArray
    stretch: float
    cores: int

    def shared(self) -> FloatArray:
        """Return the terms that a step waits for, [terms]."""
        num_ranks = len(self.terms)
        # On the cores, work is divided; where there are enough of them, the pipeline waits.
        factor = max(self.stretch, num_ranks / self.cores)
        return np.asarray(self.terms.mean(axis=0) * factor)


def work_of_step(run: ResolvedRun, script: ModelScript, cores: int) -> StepWork:
    """Count the work of all ranks of a run.

    Raises:
        TopologyError: this process is a rank of a run.
    """
    world, sizes = run.topology.world_size, run.parallelism
    ranks = [dataclasses.astuple(work_of_rank(run, script, rank)) for rank in range(world)]
    return StepWork(np.array(ranks), _stretch(run, sizes.pipeline_model_parallel_size), cores)


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
        deviation: of the logarithm of measured over predicted seconds, in the calibration.
    """

    seconds_of: FloatArray
    deviation: float

    def seconds(self, terms: FloatArray) -> float:
        """Return the seconds of a step that waits for this work, [terms].

        Raises:
            ConfigError: it sends messages, and the measured runs have not.
        """
        messages = TERMS.index("num_messages")
        if terms[messages] and not self.seconds_of[messages]:
            raise ConfigError(
                "the measured runs sent no messages, and this one does.",
                rule="what a message takes here is known from runs that sent some",
                flags=["--calibrate"],
                fix="measure a run of several ranks as well",
            )
        return float(terms @ self.seconds_of)

    def interval(self, terms: FloatArray) -> tuple[float, float]:
        """Return what nine of ten steps are between, by the residuals of the calibration."""
        middle, factor = self.seconds(terms), float(np.exp(NINE_TENTHS * self.deviation))
        return middle / factor, middle * factor


def fit_machine_time(works: Sequence[FloatArray], seconds: Sequence[float]) -> MachineTime:
    """Fit to measured steps of one machine.

    Args:
        works: [terms] of each step.


    Least squares of the relative error with factors that are not negative, by multiplicative
    updates (Lee and Seung, "Learning the parts of objects by non-negative matrix factorization",
    Nature 401, 1999), from equal shares of each kind of work on.
    """
    measured = np.array(seconds)
    terms = np.array(works) / measured[:, None]
    scale = np.maximum(terms.mean(axis=0), 1e-300)
    scaled = terms / scale
    factors = np.full(len(scale), 1 / len(scale))
    ones = np.ones(len(measured))
    for _ in range(_NUM_ROUNDS):
        predicted = scaled @ factors
        # Robust: a step that was disturbed counts less.
        weight = 1 / (1 + ((predicted - 1) / 0.1) ** 2)
        # Of work that no run has done nothing is known: it keeps the price 0.
        wanted = np.maximum(scaled.T @ (weight * predicted), 1e-300)
        factors *= (scaled.T @ (weight * ones)) / wanted
    residuals = -np.log(scaled @ factors)
    return MachineTime(factors / scale, float(np.sqrt(np.mean(residuals**2))))
