"""Cross-validation of the calibration: predict rows that the fit has not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lattice.planner.autofill import fits
from megatron_lattice.planner.calibrate import Measured, balanced_weights
from megatron_lattice.planner.figures import DISTINGUISHABLE, rows_that_compete
from megatron_lattice.planner.hardware import Hardware
from megatron_lattice.planner.layout_search import search_layouts
from megatron_lattice.planner.layout_space import Choices
from megatron_lattice.planner.memory import GIB, predict_memory
from megatron_lattice.planner.predictor import Predictor, fit_predictor
from megatron_lattice.planner.table_rows import from_rows, number_of
from megatron_lattice.planner.workload import FloatArray

MEASURED = "ref_step_s"
"""The column of measured times."""
NUM_FOLDS = 5
SEED = 8


def family_of(row: Mapping[str, str]) -> str:
    """Return the family of a row's source: the first word of its name."""
    return (row.get("source") or "").split(" ")[0]


_SAME_IN_A_GROUP = (
    "layers", "hidden", "ffn", "experts", "seq", "gpu", "n_gpus", "GBS", "precision",
)  # fmt: skip


def group_names(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the name of each row's group: the same model, GPUs and batch in other layouts."""
    return [
        row.get("rank_group") or " ".join(row.get(name) or "" for name in _SAME_IN_A_GROUP)
        for row in rows
    ]


def layout_names(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the layout of each row as text."""
    names = ("TP", "PP", "VPP", "CP", "EP", "MBS", "zero", "recompute", "sp", "schedule")
    return [" ".join(row.get(name) or "" for name in names) for row in rows]


def measured_rows(rows: Sequence[Mapping[str, str]]) -> Measured:
    """Read rows with their times, weighted by family.

    Raises:
        ConfigError: a column is missing, or a value is not a number.
    """
    seconds = np.array([number_of(row, index, MEASURED) for index, row in enumerate(rows)])
    return Measured(from_rows(rows), seconds, balanced_weights([family_of(row) for row in rows]))


def _own_last(source: str) -> tuple[bool, str]:
    """Return a key that sorts this project's own runs last: they do not move published rows."""
    return source.startswith("Lattice"), source


def random_folds(families: Sequence[str]) -> NDArray[np.int_]:
    """Return the fold of each row: drawn at random within each family."""
    draw = np.random.default_rng(SEED)
    folds = np.empty(len(families), dtype=np.int_)
    for family in sorted(set(families), key=_own_last):
        members = np.array([index for index, name in enumerate(families) if name == family])
        draw.shuffle(members)
        folds[members] = (np.arange(len(members)) + draw.integers(NUM_FOLDS)) % NUM_FOLDS
    return folds


def source_folds(rows: Sequence[Mapping[str, str]]) -> NDArray[np.int_]:
    """Return folds of whole sources: the fit uses no row of a predicted row's source."""
    sources = [row.get("source") or "" for row in rows]
    sizes = [0] * NUM_FOLDS
    fold_of: dict[str, int] = {}
    ordered = sorted(Counter(sources).items(), key=lambda item: (-item[1], item[0]))
    for source, count in sorted(ordered, key=lambda item: _own_last(item[0])[0]):
        fold_of[source] = sizes.index(min(sizes))
        sizes[fold_of[source]] += count
    return np.array([fold_of[source] for source in sources])


@dataclass(frozen=True)
class HeldOut:
    """Predictions of rows by constants that were fitted without them."""

    modelled: FloatArray
    corrected: FloatArray
    similarity: FloatArray
    """To the rows that the fit used."""
    interval: FloatArray


def cross_validated(measured: Measured, hardware: Hardware, folds: NDArray[np.int_]) -> HeldOut:
    """Predict each fold with constants and correction fitted to the other folds."""
    held_out = HeldOut(*np.empty((4, len(folds))))
    for fold in np.unique(folds):
        fitted = fit_predictor(measured.take(folds != fold), hardware)
        left_out = measured.workloads.take(folds == fold)
        held_out.modelled[folds == fold] = fitted.modelled_seconds(left_out)
        held_out.corrected[folds == fold] = fitted.seconds(left_out)
        held_out.interval[folds == fold] = fitted.interval(left_out)
        held_out.similarity[folds == fold] = fitted.correction.similarity(
            fitted.filled(left_out), fitted.hardware
        )
    return held_out


def interval_limits(measured: Measured, held_out: Sequence[HeldOut]) -> dict[str, float]:
    """Return the constants of `Predictor.interval`: nine of ten rows of each kind are within."""
    like = np.concatenate([each.similarity for each in held_out])
    predicted = np.concatenate([each.corrected for each in held_out])
    repeated = len(held_out)
    off = np.abs(np.log(predicted / np.tile(measured.step_s, repeated)))
    weight = np.tile(measured.weight, repeated)
    is_moe = np.tile(measured.workloads.is_moe, repeated)
    found = {}
    for kind, rows in (("dense", ~is_moe), ("experts", is_moe)):
        is_near = like >= 0.5
        near = _nine_tenths(off, weight, rows & is_near)
        far = max(near, _nine_tenths(off, weight, rows & ~is_near))
        scale = _nine_tenths(off / (like * near + (1 - like) * far), weight, rows)
        found[f"software.interval.{kind}.near"] = scale * near
        found[f"software.interval.{kind}.far"] = scale * far
    return found


def _nine_tenths(values: FloatArray, weight: FloatArray, chosen: NDArray[np.bool_]) -> float:
    """Return the value that nine tenths of the weight of the chosen rows does not exceed."""
    order = np.argsort(values[chosen])
    share = np.cumsum(weight[chosen][order]) / np.sum(weight[chosen])
    return float(values[chosen][order][np.searchsorted(share, 0.9)])


def memory_figures(
    rows: Sequence[Mapping[str, str]], predictor: Predictor
) -> tuple[float, FloatArray]:
    """Return the share of rows that fit, and the errors where the memory was published, in GiB."""
    hardware = predictor.hardware
    filled = predictor.filled(from_rows(rows))
    published = np.array([float(row.get("mem_GB_per_gpu") or "nan") for row in rows])
    errors = np.abs(predict_memory(filled, hardware).total / GIB / published - 1)
    return float(np.mean(fits(filled, hardware))), errors[~np.isnan(errors)]


@dataclass(frozen=True)
class ChoiceFigures:
    """Choices for groups of rows that differ by layout only."""

    num_groups: int
    as_fast_as_published: int
    """Groups whose published layouts are all predicted no faster than the search's first layout."""
    near_fastest: int
    """Groups in which the published layout with the fastest prediction was measured to be the
    fastest, or indistinguishable from it."""

    def line(self) -> str:
        """Return the figures as a sentence."""
        return (
            f"{self.num_groups} groups of layouts: in {self.as_fast_as_published} none is predicted"
            f" to be faster than the first of a search; in {self.near_fastest} the one predicted to"
            f" be the fastest was within {100 * DISTINGUISHABLE:.0f} % of the fastest"
        )


def choice_figures(rows: Sequence[Mapping[str, str]], predictor: Predictor) -> ChoiceFigures:
    """Search a layout for each published group of layouts, and compare."""
    groups = rows_that_compete([row.get("rank_group") or "" for row in rows])
    num_fast = num_near = 0
    for indices in groups:
        members = [rows[index] for index in indices]
        published = from_rows(members)
        predicted = predictor.seconds(published)
        found = search_layouts(published.take(np.array([0])), Choices(), predictor)
        num_fast += bool(found.seconds.min() <= predicted.min() * (1 + 1e-9))
        measured = np.array([float(row[MEASURED]) for row in members])
        num_near += bool(measured[predicted.argmin()] <= measured.min() * (1 + DISTINGUISHABLE))
    return ChoiceFigures(len(groups), num_fast, num_near)
