"""The time model with its constants and its correction: fit, load and predict."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lattice.planner.autofill import autofill, fits
from megatron_lattice.planner.calibrate import Measured, fit
from megatron_lattice.planner.correction import Correction, fit_correction, load_correction
from megatron_lattice.planner.hardware import Hardware, load_hardware
from megatron_lattice.planner.memory import GIB, predict_memory
from megatron_lattice.planner.step_time import predict_step
from megatron_lattice.planner.table_rows import from_rows
from megatron_lattice.planner.workload import FloatArray, Workloads

NINE_TENTHS = 1.645
"""Number of standard deviations around the mean that contain 90 % of a normal distribution."""


@dataclass(frozen=True)
class Predictor:
    """Predicts the step seconds of rows, which may have blanks."""

    hardware: Hardware
    correction: Correction
    deviation: float | None = None
    """Deviation of the log error on runs of this cluster; None without such runs."""

    def modelled_seconds(self, workloads: Workloads) -> FloatArray:
        """Return the seconds of the time model without the correction."""
        return predict_step(self.filled(workloads), self.hardware).total

    def filled(self, workloads: Workloads) -> Workloads:
        """Return the table without blanks."""
        filled = autofill(workloads, self.hardware)
        return self.correction.completed(filled, self.hardware)

    def seconds(self, workloads: Workloads) -> FloatArray:
        """Return the seconds, corrected by the errors on similar measured steps."""
        filled = self.filled(workloads)
        factor = self.correction.factor(filled, self.hardware)
        return factor * predict_step(filled, self.hardware).total

    def interval(self, workloads: Workloads) -> FloatArray:
        """Return the factor within which 90 % of measured steps lie, in either direction.

        The residuals of this cluster's runs give it if there are any. Else it is interpolated
        between two limits of the cross-validation, by the similarity to measured rows: two for
        dense models, and two for experts. Without a measured run of a row's kind, an error of the
        kind is added, as large as an error of the row; see `Correction.has_kind`.
        """
        if self.deviation is not None:
            return np.full(len(workloads), np.exp(NINE_TENTHS * self.deviation))
        filled = self.filled(workloads)
        like = self.correction.similarity(filled, self.hardware)
        constant = self.hardware.constant
        limits = [
            like * constant(f"interval.{kind}.near") + (1 - like) * constant(f"interval.{kind}.far")
            for kind in ("dense", "experts")
        ]
        limit = np.where(filled.is_moe, limits[1], limits[0])
        has_kind = self.correction.has_kind(filled, self.hardware)
        return np.asarray(np.exp(np.where(has_kind, limit, np.sqrt(2) * limit)))

    def caution(self, workloads: Workloads) -> FloatArray:
        """Return the factor on seconds by which a search compares rows; no blanks.

        The error that a kind without measured runs adds is in favour of the fastest such row: of
        many wrong predictions, a search finds the one that is wrong the most.
        """
        constant, is_moe = self.hardware.constant, workloads.is_moe
        limit = np.where(is_moe, constant("interval.experts.far"), constant("interval.dense.far"))
        has_kind = self.correction.has_kind(workloads, self.hardware)
        return np.asarray(np.exp(np.where(has_kind, 0.0, limit)))


def fit_predictor(measured: Measured, hardware: Hardware) -> Predictor:
    """Fit the constants, then fit the correction to the remaining errors."""
    fitted = fit(measured, hardware)
    filled = autofill(measured.workloads, fitted)
    predicted = predict_step(filled, fitted).total
    return Predictor(fitted, fit_correction(filled, fitted, measured.step_s, predicted))


def load_predictor() -> Predictor:
    """Return the predictor of the last calibration."""
    return Predictor(load_hardware(), load_correction())


COLUMNS = ("id", "predicted_step_s", "predicted_mem_GB", "fits", "low_step_s", "high_step_s")


def score_rows(rows: Sequence[Mapping[str, str]], predictor: Predictor) -> list[dict[str, str]]:
    """Predict each row, including rows that do not fit into memory.

    Memory is in GiB. 90 % of measured steps lie between the low and the high time.
    """
    workloads = predictor.filled(from_rows(rows))
    seconds = predictor.seconds(workloads)
    memory = predict_memory(workloads, predictor.hardware).total / GIB
    off = predictor.interval(workloads)
    enough = fits(workloads, predictor.hardware)
    return [
        {
            "id": row.get("id") or str(index + 1),
            "predicted_step_s": f"{seconds[index]:.6g}",
            "predicted_mem_GB": f"{memory[index]:.4g}",
            "fits": "yes" if enough[index] else "no",
            "low_step_s": f"{seconds[index] / off[index]:.6g}",
            "high_step_s": f"{seconds[index] * off[index]:.6g}",
        }
        for index, row in enumerate(rows)
    ]


def write_scores(scores: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write the predictions as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(scores)
