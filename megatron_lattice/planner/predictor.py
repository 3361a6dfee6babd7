"""The time model with its constants and its correction, as one thing to fit, load and ask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.blanks import fill_blanks
from megatron_lattice.planner.calibrate import Measured, fit
from megatron_lattice.planner.correction import Correction, fit_correction, load_correction
from megatron_lattice.planner.hardware import Hardware, load_hardware
from megatron_lattice.planner.step_time import predict_step
from megatron_lattice.planner.workload import FloatArray, Workloads

NINE_TENTHS = 1.645
"""Standard deviations on either side that hold nine tenths of a normal distribution."""


@dataclass(frozen=True)
class Predictor:
    """Predicts seconds of a step of rows, which may have blanks."""

    hardware: Hardware
    correction: Correction
    deviation: float | None = None
    """Of the logarithm of the error, where runs of this cluster were measured."""

    def modelled_seconds(self, workloads: Workloads) -> FloatArray:
        """Return what the terms of the time model add up to."""
        return predict_step(fill_blanks(workloads, self.hardware), self.hardware).total

    def seconds(self, workloads: Workloads) -> FloatArray:
        """Return the same, corrected by measured steps like these."""
        filled = fill_blanks(workloads, self.hardware)
        factor = self.correction.factor(filled, self.hardware)
        return factor * predict_step(filled, self.hardware).total

    def interval(self, workloads: Workloads) -> FloatArray:
        """Return by what factor nine of ten measured steps are off at most, in either direction.

        Rows like measured ones are known better than others; both limits are those of
        cross-validation. Where runs of this cluster were measured, their residuals say it.
        """
        if self.deviation is not None:
            return np.full(len(workloads), np.exp(NINE_TENTHS * self.deviation))
        filled = fill_blanks(workloads, self.hardware)
        near, far = (self.hardware.constant(f"interval.{name}") for name in ("near", "far"))
        like = self.correction.likeness(filled, self.hardware)
        return np.asarray(np.exp(like * near + (1 - like) * far))


def fit_predictor(measured: Measured, hardware: Hardware) -> Predictor:
    """Fit the constants, then the correction to the errors that are left."""
    fitted = fit(measured, hardware)
    filled = fill_blanks(measured.workloads, fitted)
    predicted = predict_step(filled, fitted).total
    return Predictor(fitted, fit_correction(filled, fitted, measured.step_s, predicted))


def load_predictor() -> Predictor:
    """Return the predictor of the last calibration."""
    return Predictor(load_hardware(), load_correction())
