"""Fit the planner to runs that were measured on one cluster.

A few steps of some layouts say what the published measurements cannot: how this cluster, with its
clocks, network and software, differs from those. The constants move from where the published steps
have put them, each less far than in the calibration on those, because a few runs say little about
each. The interval of predictions is that of the residuals, with the published one as prior.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron.training.setup.traced_rank import ModelScript
from megatron_lattice.planner.calibrate import Measured, fit
from megatron_lattice.planner.hardware import Gpu, Prior
from megatron_lattice.planner.machine_time import MachineTime, fit_machine_time, work_of_step
from megatron_lattice.planner.measured_run import MeasuredRun, row_of_run
from megatron_lattice.planner.predictor import NINE_TENTHS, Predictor
from megatron_lattice.planner.work import OperationTimes, work_of_ranks
from megatron_lattice.planner.workload import FloatArray, joined

_LESS_WIDE = 0.5
"""How far a constant may move, over how far it may in the calibration on published steps."""
_WEIGHT = 10.0
"""What a run of this cluster counts as, against a published one."""
_PRIOR_RUNS = 2.0
"""Runs that the deviation of published steps counts as."""
_PRIOR_MACHINE = 0.15
"""Deviation of the logarithm for a machine of which nothing is known."""


def calibrate_to_runs(predictor: Predictor, measured: Sequence[MeasuredRun], gpu: Gpu) -> Predictor:
    """Return the predictor for the cluster on which these runs were measured; itself for none.

    Args:
        gpu: of that cluster, with its network.
    Raises:
        ConfigError: the planner has no constants for the precision of a run.
    """
    if not measured:
        return predictor
    rows = joined([row_of_run(each.run, gpu) for each in measured])
    seconds = np.array([each.step_s for each in measured])
    hardware = predictor.hardware
    # What published steps have left as priors is where this cluster is expected.
    priors = {
        name: Prior(hardware.constants[name], _LESS_WIDE * prior.width)
        for name, prior in hardware.priors.items()
    }
    start = dataclasses.replace(hardware, priors=priors)
    corrected = predictor.correction.factor(rows, hardware)
    fitted = fit(Measured(rows, seconds / corrected, np.full(len(seconds), _WEIGHT)), start)
    found = dataclasses.replace(predictor, hardware=dataclasses.replace(fitted, priors={}))
    off = np.log(found.interval(rows)) / NINE_TENTHS
    residuals = np.log(found.seconds(rows) / seconds)
    return dataclasses.replace(found, deviation=_deviation(residuals, float(np.mean(off))))


def calibrate_to_machine(
    measured: Sequence[MeasuredRun], script: ModelScript, cores: int, times: OperationTimes
) -> MachineTime:
    """Return what a unit of work takes on the machine without accelerators that ran these.

    Args:
        times: of the operations of this machine.
    Raises:
        TopologyError: this process is a rank of a run.
    """
    works = [
        work_of_step(each.run, work_of_ranks(each.run, script), cores, times) for each in measured
    ]
    seconds = [each.step_s for each in measured]
    found = fit_machine_time(works, seconds)
    residuals = np.log([found.seconds(work) for work in works]) - np.log(seconds)
    return dataclasses.replace(found, deviation=_deviation(residuals, _PRIOR_MACHINE))


def _deviation(residuals: FloatArray, prior: float) -> float:
    """Return the deviation of the logarithm, known from few residuals and a prior."""
    number = len(residuals) + _PRIOR_RUNS
    return float(np.sqrt((np.sum(residuals**2) + _PRIOR_RUNS * prior**2) / number))
