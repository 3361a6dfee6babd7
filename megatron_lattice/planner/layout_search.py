"""Search the fastest layout that fits; if no layout fits, name the changes that would help."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lattice.planner.autofill import SAFE_SHARE
from megatron_lattice.planner.hardware import Gpu, Hardware, rows_hardware
from megatron_lattice.planner.layout_space import Choices, layout_space
from megatron_lattice.planner.memory import predict_memory
from megatron_lattice.planner.predictor import Predictor
from megatron_lattice.planner.step_time import predict_step
from megatron_lattice.planner.workload import FloatArray, Workloads

BLOCK = 32768
"""Rows that are computed at a time: their few hundred columns fit into 100 MB."""
CORRECTED = 2048
"""Fastest rows whose order the measured steps correct."""
EQUALLY_GOOD = 0.05
"""Predictions that differ by less have no order: half of the predictions are farther off."""
MOST_GROWTH = 64
"""Largest factor on the number of GPUs that is tried if no layout fits."""
AXES = (
    "tensor_size", "pipeline_size", "context_size", "expert_size", "data_size",
    "micro_batch_size", "num_chunks", "sharding_stage", "recompute",
)  # fmt: skip


@dataclass(frozen=True)
class SearchResult:
    """All layouts of a search.

    Attributes:
        table: every layout that divides.
        memory: bytes of each.
        seconds: of a step of each that fits, else infinite.
        order: rows that fit, the fastest first, by seconds times `caution`.
        caution: see `Predictor.caution`.
        refused: ways of splitting that do not divide, by the reason.
    """

    table: Workloads
    memory: FloatArray
    seconds: FloatArray
    order: NDArray[np.int_]
    refused: Counter[str]
    caution: FloatArray

    @property
    def compared(self) -> FloatArray:
        """Return the seconds by which rows are compared."""
        return self.seconds * self.caution

    def best_with(self, axis: str, value: object) -> int | None:
        """Return the fastest row with a value on an axis; None if no such row fits."""
        column = getattr(self.table, axis)
        rows = self.order[column[self.order] == value]
        return int(rows[0]) if len(rows) else None

    def least_memory(self, axis: str | None = None, value: object = None) -> int:
        """Return the row that needs the fewest bytes, among the rows with a value on an axis."""
        rows = np.arange(len(self.table))
        if axis is not None:
            rows = rows[getattr(self.table, axis) == value]
        return int(rows[np.argmin(self.memory[rows])])


def search_layouts(model: Workloads, choices: Choices, predictor: Predictor) -> SearchResult:
    """Predict the memory of all layouts, and the time of all layouts that fit.

    Args:
        model: one row, see `layout_space`.
    """
    hardware = predictor.hardware
    space = layout_space(model, choices)
    memory, fitting = _memory(space.table, hardware)
    seconds, caution = np.full(len(space.table), np.inf), np.ones(len(space.table))
    for rows in _blocks(np.flatnonzero(fitting)):
        some = space.table.take(rows)
        seconds[rows] = predict_step(some, hardware).total
        caution[rows] = predictor.caution(some)
    order = np.argsort(seconds * caution, kind="stable")[: int(fitting.sum())]
    first = order[:CORRECTED]
    if len(first):
        some = space.table.take(first)
        seconds[first] *= predictor.correction.factor(some, hardware)
        order[:CORRECTED] = first[np.argsort((seconds * caution)[first], kind="stable")]
    return SearchResult(space.table, memory, seconds, order, space.refused, caution)


def _memory(table: Workloads, hardware: Hardware) -> tuple[FloatArray, NDArray[np.bool_]]:
    memory, fitting = np.empty(len(table)), np.empty(len(table), dtype=np.bool_)
    for rows in _blocks(np.arange(len(table))):
        some = table.take(rows)
        memory[rows] = predict_memory(some, hardware).total
        fitting[rows] = memory[rows] <= SAFE_SHARE * rows_hardware(some, hardware).memory_bytes
    return memory, fitting


def _blocks(rows: NDArray[np.int_]) -> Iterator[NDArray[np.int_]]:
    for start in range(0, len(rows), BLOCK):
        yield rows[start : start + BLOCK]


def on_gpus(model: Workloads, gpu: Gpu, world_size: int) -> Workloads:
    """Return the row on another number and kind of GPUs, with their usual network."""
    return model.replace(
        gpu=np.array([gpu.name]),
        world_size=np.array([float(world_size)]),
        nvlink_domain=np.array([float(gpu.nvlink_domain)]),
        nic_bytes_per_s=np.array([gpu.nic_bytes_per_s]),
    )


def what_would_fit(model: Workloads, choices: Choices, predictor: Predictor) -> list[str]:
    """Return, as text, changes that make at least one layout fit."""
    hardware, world = predictor.hardware, int(model.world_size[0])
    gpu = hardware.gpus[str(model.gpu[0])]

    def fits(changed: Workloads, among: Choices) -> bool:
        space = layout_space(changed, among)
        return bool(len(space.table) and _memory(space.table, hardware)[1].any())

    found = []
    if choices.recompute and fits(model, dataclasses.replace(choices, recompute=())):
        found.append("leave the recomputation to the search")
    if choices != Choices() and fits(model, Choices()):
        found.append("leave all parallel sizes, micro batch and recomputation to the search")
    if fits(model.replace(optimizer_bytes=np.array([0.0])), choices):
        found.append("--optimizer-cpu-offload: main weights and moments in host memory")
    growth = 2
    while growth <= MOST_GROWTH:
        if fits(model.replace(world_size=model.world_size * growth), choices):
            found.append(f"{world * growth} GPUs")
            break
        growth *= 2
    larger = [each for each in hardware.gpus.values() if each.memory_bytes > gpu.memory_bytes]
    for each in sorted(larger, key=lambda each: each.memory_bytes):
        if fits(on_gpus(model, each, world), choices):
            found.append(f"{world} {each.name} of {each.memory_bytes / 2**30:.0f} GiB each")
            break
    return found
