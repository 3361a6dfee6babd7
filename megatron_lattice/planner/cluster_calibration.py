"""Fit the planner to runs that were measured on one cluster.

A few measured steps show how this cluster (its clocks, network and software) differs from the
clusters of the published steps. The fit starts from the constants of the published calibration and
may move each constant less than that calibration, because a few runs determine each constant only
weakly. The interval of predictions is computed from the residuals, with the published interval as
prior.
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
from megatron_lattice.planner.workload import FloatArray, Workloads

_LESS_WIDE = 0.5
"""Width of the prior of each constant, relative to its width in the published calibration."""
_WEIGHT = 10.0
"""Weight of a run of this cluster; a published run has a weight of about 1."""
_PRIOR_RUNS = 2.0
"""Number of runs that the deviation of published steps counts as."""
_PRIOR_MACHINE = 0.15
"""Prior deviation of the logarithm of seconds for a machine without measurements."""


def calibrate_to_runs(predictor: Predictor, measured: Sequence[MeasuredRun], gpu: Gpu) -> Predictor:
    """Fit the predictor to runs of one cluster; without runs, return it unchanged.

    Args:
        gpu: GPU of the cluster, with its network.
    Raises:
        ConfigError: the planner has no constants for the precision of a run.
    """
    if not measured:
        return predictor
    tables = [row_of_run(each.run, gpu) for each in measured]
    columns = {
        field.name: np.concatenate([getattr(table, field.name) for table in tables])
        for field in dataclasses.fields(Workloads)
    }
    rows = Workloads(**columns)
    seconds = np.array([each.step_s for each in measured])
    hardware = predictor.hardware
    # The constants of the published calibration are the priors of this cluster.
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
    """Fit the seconds of a unit of work to runs of a machine without accelerators.

    Args:
        times: measured operations of this machine.
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
    """Return the deviation of the logarithm, from the residuals and the prior."""
    number = len(residuals) + _PRIOR_RUNS
    return float(np.sqrt((np.sum(residuals**2) + _PRIOR_RUNS * prior**2) / number))
