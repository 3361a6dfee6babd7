"""Correct predicted times by the errors that the model makes on measured steps like them.

Similar runs have similar errors, caused by effects outside the time model: a cluster's host
overhead, a release's kernels. Gaussian process regression ("Gaussian Processes for Machine
Learning", Rasmussen and Williams, chapter 2) of log(measured / predicted) over hardware, software,
model and layout learns these errors: a row near measured rows gets their error, a row far from all
measured rows gets no correction. Rows that contradict many similar rows lose weight. Names of
models and sources are not used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_lattice.planner.hardware import Hardware, rows_hardware
from megatron_lattice.planner.workload import FloatArray, Workloads

FILE = Path(__file__).parent / "correction.json"

# Weight of each feature's difference in the kernel. Sizes are in powers of two, choices are 0 or
# 1. A difference in hardware or software counts most; a factor of two in the size of the model
# counts more than a factor of two in the number of ranks.
_OTHER_KIND = 1.5
_MODEL = 1.0
_LAYOUT = 0.5
NOISE = 0.5
"""Deviation of repeated measurements, relative to the deviation of the model's errors."""
OUTLIER = 0.06
"""A row whose log error differs this much from the error of similar rows counts half."""
ALIKE = 0.5
"""Similarity above which two rows are alike: a row has the graphs of one that is alike."""
_NEAREST = 0.7
"""Rows that are less similar than this share of the most similar one do not count for graphs."""
_OF_MODEL = ("attended_share", "has_sinks")
_KIND = 1 + len(_OF_MODEL)
"""Column of the facts with the kind of the run."""
_SIZES = ("num_layers", "hidden_size", "num_experts")
_GENERATIONS = ("ampere", "hopper", "blackwell")
_ROUNDS = 8
_DIGITS = 4


@dataclass(frozen=True)
class Correction:
    """Features and weights of the measured rows.

    Attributes:
        features: [rows, dimensions], see `features_of`.
        weights: [rows]; the log correction of a row is the sum of weight times kernel.
        facts: [rows, columns]: whether the whole step was a graph (-1: a dense model), `_OF_MODEL`,
            the kind of the run, the tokens of a micro batch, and `_SIZES`; see `completed` and
            `has_kind`.
    """

    features: FloatArray
    weights: FloatArray
    facts: FloatArray

    def factor(self, workloads: Workloads, hardware: Hardware) -> FloatArray:
        """Return the factor that corrects predicted seconds; rows must have no blanks."""
        return np.exp(_kernel(features_of(workloads, hardware), self.features) @ self.weights)

    def similarity(self, workloads: Workloads, hardware: Hardware) -> FloatArray:
        """Return each row's similarity to its nearest measured row: 1 identical, 0 unrelated."""
        kernel = _kernel(features_of(workloads, hardware), self.features)
        return np.asarray(kernel.max(axis=1, initial=0.0))

    def has_kind(self, workloads: Workloads, hardware: Hardware) -> NDArray[np.bool_]:
        """Return whether a measured run has the kind of each row, with as large a micro batch.

        A kind is the generation of the GPU, dense or experts, and whether ZeRO-3 shards weights. No
        micro batch is smaller than one sample, so one long sample is as measured as a short one.
        """
        kinds, largest = _kind_of(workloads, hardware), np.zeros(len(workloads))
        for kind in np.unique(kinds):
            tokens = self.facts[self.facts[:, _KIND] == kind, _KIND + 1]
            largest[kinds == kind] = tokens.max(initial=0.0)
        is_small = (workloads.microbatch_tokens <= largest) | (workloads.micro_batch_size == 1)
        return np.asarray((largest > 0) & is_small)

    def save(self) -> None:
        """Write the file that `load_correction` reads."""
        content = {name: column.tolist() for name, column in vars(self).items()}
        FILE.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def completed(self, workloads: Workloads, hardware: Hardware) -> Workloads:
        """Fill graphs, grouped products, windows and sinks of rows that do not state the graphs.

        Tables of results seldom state them. A row with experts gets the windows and sinks of a
        calibrated model of the same sizes, and CUDA graphs of the whole step if most similar rows
        had them.
        """
        is_open = workloads.is_moe & (workloads.graphs == "")
        if not is_open.any():
            return workloads
        like = _kernel(features_of(workloads, hardware)[:, 1:], self.features[:, 1:])
        like = np.where(workloads.is_moe[:, None] & (self.facts[:, 0] >= 0), like, 0.0)
        near = np.where(like > _NEAREST * like.max(axis=1, keepdims=True), like, 0.0)
        votes = (near @ (self.facts[:, 0] > 0)) / np.maximum(near.sum(axis=1), 1e-9)
        is_known = is_open & (like.max(axis=1) > ALIKE)
        is_graph = np.where(is_open, is_known & (votes >= 0.5), workloads.graphs == "iteration")
        sizes = np.stack([getattr(workloads, name) for name in _SIZES], axis=1)
        is_same = (sizes[:, None] == self.facts[None, :, -len(_SIZES) :]).all(axis=-1)
        model = self.facts[np.where(is_same, 1 + like, 0.0).argmax(axis=1)]
        is_found = is_open & is_same.any(axis=1)
        columns = {
            name: np.where(is_found, model[:, index], getattr(workloads, name))
            for index, name in enumerate(_OF_MODEL, 1)
        }
        columns["grouped_products"] = np.where(is_open, is_graph, workloads.grouped_products)
        return workloads.replace(
            **columns, graphs=np.where(is_graph, "iteration", workloads.graphs)
        )


def load_correction() -> Correction:
    """Read the correction of the last calibration."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return Correction(**{name: np.array(column) for name, column in content.items()})


def fit_correction(
    workloads: Workloads, hardware: Hardware, measured: FloatArray, predicted: FloatArray
) -> Correction:
    """Fit the correction to predictions and measurements of rows without blanks."""
    features = features_of(workloads, hardware)
    kernel, errors = _kernel(features, features), np.log(measured / predicted)
    noise = np.full(len(features), NOISE**2)
    for _ in range(_ROUNDS):
        # Leave-one-out residuals (Rasmussen and Williams, equation 5.12), with the weights of
        # Student's t distribution.
        inverse = np.linalg.inv(kernel + np.diag(noise))
        left_out = inverse @ errors / np.diag(inverse)
        noise = NOISE**2 * (1 + (left_out / OUTLIER) ** 2)
    weights = np.linalg.solve(kernel + np.diag(noise), errors)
    graphs = np.where(workloads.is_moe, workloads.graphs == "iteration", -1.0)
    columns = [getattr(workloads, name) for name in (*_OF_MODEL, *_SIZES)]
    of_run = (_kind_of(workloads, hardware), workloads.microbatch_tokens)
    facts = np.stack([graphs, *columns[: _KIND - 1], *of_run, *columns[_KIND - 1 :]], axis=1)
    return Correction(features, np.round(weights, _DIGITS + 2), np.round(facts, _DIGITS))


def features_of(workloads: Workloads, hardware: Hardware) -> FloatArray:
    """Return the features of each row: [rows, dimensions], scaled by how much they count."""
    rows = rows_hardware(workloads, hardware)
    recomputed = np.where(workloads.recompute == "full", workloads.recompute_share, 0.0)
    kinds = [rows.generation == name for name in _GENERATIONS]
    kinds += [workloads.precision == name for name in ("mxfp8", "nvfp4")]
    kinds += [np.isin(workloads.precision, ("fp8",))]
    kinds += [workloads.software == name for name in ("unfused", "deepspeed", "fsdp")]
    kinds += [np.isin(workloads.software, ("megatron", "lattice"))]
    kinds = [workloads.graphs == "iteration", *kinds]
    scaled = [_OTHER_KIND * kind for kind in kinds]
    scaled.append(_OTHER_KIND * np.log2(rows.peak_16_bit_flops))
    model = (
        np.log2(workloads.hidden_size), np.log2(workloads.num_layers),
        np.log2(workloads.context_size), recomputed, workloads.is_moe,
        workloads.kv_channels % 8 > 0, workloads.is_lattice,
    )  # fmt: skip
    scaled += [_MODEL * value for value in model]
    near = (
        workloads.tensor_size, workloads.micro_batch_size, workloads.nic_bytes_per_s,
        workloads.expert_size,
    )  # fmt: skip
    scaled += [_LAYOUT * np.log2(value) for value in near]
    scaled.append(_LAYOUT / 2 * np.log2(workloads.seq_length))
    farther = (workloads.num_microbatches, workloads.pipeline_size, workloads.num_chunks)
    scaled += [_LAYOUT / 3 * np.log2(value) for value in farther]
    scaled.append(_LAYOUT / 6 * np.log2(workloads.data_size))
    return np.round(np.stack(scaled, axis=1), _DIGITS)


def _kind_of(workloads: Workloads, hardware: Hardware) -> FloatArray:
    """Return the number of each row's kind, see `Correction.has_kind`."""
    generations = rows_hardware(workloads, hardware).generation
    number = sum(index * (generations == name) for index, name in enumerate(_GENERATIONS, 1))
    is_gathered = workloads.sharding_stage >= 3
    return np.asarray(4.0 * number + 2 * workloads.is_moe + is_gathered)


def _kernel(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the squared exponential kernel, [rows of left, rows of right]."""
    distance = ((left[:, None] - right[None]) ** 2).sum(axis=-1)
    return np.exp(-distance / 2)
