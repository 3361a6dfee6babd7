"""Correct predicted times by the errors that the model makes on measured steps like them.

What the terms of the time model leave out is much the same for similar runs: a cluster's
host overhead, a release's kernels. Gaussian process regression ("Gaussian Processes for Machine
Learning", Rasmussen and Williams, chapter 2) of log(measured / predicted) over hardware, software,
model and layout learns it: a row between measured ones gets their error, a row far from all of
them gets none. Where rows with the same description contradict each other, most of them win. No
name of a model or of a source is looked at.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lattice.planner.hardware import Hardware, rows_hardware
from megatron_lattice.planner.workload import FloatArray, Workloads

FILE = Path(__file__).parent / "correction.json"

# How much a difference counts, against a difference of 1 in the kernel. Sizes are
# in powers of two, choices are 0 or 1. Other hardware or software is unlike; twice the model is
# less like than twice the ranks.
_OTHER_KIND = 1.5
_MODEL = 1.0
_LAYOUT = 0.5
NOISE = 0.5
"""Deviation of repeated measurements over that of the model's errors."""
OUTLIER = 0.06
"""Where rows like it say so much else in log, a row counts half: another system, or a bad day."""
_ROUNDS = 8
_DIGITS = 4


@dataclass(frozen=True)
class Correction:
    """Measured rows, by their features and their weight.

    Attributes:
        features: [rows, dimensions], see `features_of`.
        weights: [rows]; the correction of a row is the sum of these times the kernel.
    """

    features: FloatArray
    weights: FloatArray

    def factor(self, workloads: Workloads, hardware: Hardware) -> FloatArray:
        """Return what to multiply predicted seconds with; rows must have no blanks."""
        return np.exp(_kernel(features_of(workloads, hardware), self.features) @ self.weights)

    def similarity(self, workloads: Workloads, hardware: Hardware) -> FloatArray:
        """Return how like the nearest measured row each row is: 1 the same, 0 unlike all."""
        kernel = _kernel(features_of(workloads, hardware), self.features)
        return np.asarray(kernel.max(axis=1, initial=0.0))

    def save(self) -> None:
        """Write the file that `load_correction` reads."""
        content = {"features": self.features.tolist(), "weights": self.weights.tolist()}
        FILE.write_text(json.dumps(content) + "\n", encoding="utf-8")


def load_correction() -> Correction:
    """Read the correction of the last calibration."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return Correction(np.array(content["features"]), np.array(content["weights"]))


def fit_correction(
    workloads: Workloads, hardware: Hardware, measured: FloatArray, predicted: FloatArray
) -> Correction:
    """Learn from the errors of predictions of measured rows, which have no blanks."""
    features = features_of(workloads, hardware)
    kernel, errors = _kernel(features, features), np.log(measured / predicted)
    noise = np.full(len(features), NOISE**2)
    for _ in range(_ROUNDS):
        # What each row differs by from what the others say of it (Rasmussen and Williams, equation
        # 5.12), with the weights of Student's t distribution.
        inverse = np.linalg.inv(kernel + np.diag(noise))
        left_out = inverse @ errors / np.diag(inverse)
        noise = NOISE**2 * (1 + (left_out / OUTLIER) ** 2)
    weights = np.linalg.solve(kernel + np.diag(noise), errors)
    return Correction(features, np.round(weights, _DIGITS + 2))


def features_of(workloads: Workloads, hardware: Hardware) -> FloatArray:
    """Return the features of each row: [rows, dimensions], scaled by how much they count."""
    rows = rows_hardware(workloads, hardware)
    recomputed = np.where(workloads.recompute == "full", workloads.recompute_share, 0.0)
    kinds = [rows.generation == name for name in ("ampere", "hopper", "blackwell")]
    kinds += [workloads.precision == name for name in ("mxfp8", "nvfp4")]
    kinds += [np.isin(workloads.precision, ("fp8",))]
    kinds += [workloads.software == name for name in ("unfused", "deepspeed", "megatron", "fsdp")]
    scaled = [_OTHER_KIND * kind for kind in kinds]
    scaled.append(_OTHER_KIND * np.log2(rows.peak_16_bit_flops))
    model = (
        np.log2(workloads.hidden_size), np.log2(workloads.num_layers),
        np.log2(workloads.context_size), recomputed, workloads.is_moe,
        workloads.kv_channels % 8 > 0,
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


def _kernel(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the squared exponential kernel, [rows of left, rows of right]."""
    distance = ((left[:, None] - right[None]) ** 2).sum(axis=-1)
    return np.exp(-distance / 2)
