"""Cross-validation of the calibration: predictions of rows that the fit has not seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.planner.calibrate import Measured, balanced_weights, fit
from megatron.planner.hardware import Hardware
from megatron.planner.search import fill_blanks
from megatron.planner.step_time import predict_step
from megatron.planner.workload import FloatArray, Workloads, from_rows

NUM_FOLDS = 5
SEED = 8


def family_of(row: Mapping[str, str]) -> str:
    """Return the family of a row's source: the first word of its name."""
    return (row.get("source") or "").split(" ")[0]


def measured_rows(rows: Sequence[Mapping[str, str]]) -> Measured:
    """Read rows with their times, weighted by family."""
    seconds = np.array([float(row["ref_step_s"]) for row in rows])
    return Measured(from_rows(rows), seconds, balanced_weights([family_of(row) for row in rows]))


def random_folds(families: Sequence[str]) -> NDArray[np.int_]:
    """Return the fold of each row: drawn at random within each family."""
    draw = np.random.default_rng(SEED)
    folds = np.empty(len(families), dtype=np.int_)
    for family in sorted(set(families)):
        members = np.array([index for index, name in enumerate(families) if name == family])
        draw.shuffle(members)
        folds[members] = (np.arange(len(members)) + draw.integers(NUM_FOLDS)) % NUM_FOLDS
    return folds


def family_folds(families: Sequence[str]) -> NDArray[np.int_]:
    """Return folds of whole families: what is predicted comes from sources never seen."""
    sizes = [0] * NUM_FOLDS
    fold_of: dict[str, int] = {}
    for family, count in sorted(Counter(families).items(), key=lambda item: (-item[1], item[0])):
        fold_of[family] = sizes.index(min(sizes))
        sizes[fold_of[family]] += count
    return np.array([fold_of[family] for family in families])


def predict_seconds(workloads: Workloads, hardware: Hardware) -> FloatArray:
    """Predict the seconds of a step of rows that may have blanks."""
    return predict_step(fill_blanks(workloads, hardware), hardware).total


def cross_validated(measured: Measured, hardware: Hardware, folds: NDArray[np.int_]) -> FloatArray:
    """Predict each fold with constants fitted to the other ones."""
    predicted = np.empty(len(folds))
    for fold in np.unique(folds):
        fitted = fit(measured.take(folds != fold), hardware)
        left_out = measured.workloads.take(folds == fold)
        predicted[folds == fold] = predict_seconds(left_out, fitted)
    return predicted
