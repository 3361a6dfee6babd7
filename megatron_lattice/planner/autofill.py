"""Fill blank choices of a run with the fastest choice that fits into memory."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from megatron_lattice.planner.hardware import Hardware, rows_hardware
from megatron_lattice.planner.memory import predict_memory
from megatron_lattice.planner.step_time import predict_step
from megatron_lattice.planner.workload import FloatArray, Workloads

MICRO_BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
MAX_CHUNKS = 12
USABLE_SHARE = 0.95
"""Share of a GPU's memory up to which published runs fit: those with a higher predicted use ran
out of memory."""
SAFE_SHARE = 0.9
"""Share that a layout may need for the search to choose it: the rest is for fragmentation, and for
experts that receive more tokens than the mean."""
RECOMPUTE_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the layers to recompute that are tried."""


def fits(workloads: Workloads, hardware: Hardware) -> NDArray[np.bool_]:
    """Return which rows fit into the memory of their GPU, with a reserve for fragmentation."""
    available = USABLE_SHARE * rows_hardware(workloads, hardware).memory_bytes
    return predict_memory(workloads, hardware).total <= available


def has_open_choices(workloads: Workloads) -> NDArray[np.bool_]:
    """Return which rows leave the micro batch, the chunks or the recomputation open."""
    numbers = np.isnan(workloads.micro_batch_size) | np.isnan(workloads.num_chunks)
    return numbers | (workloads.recompute == "")


def autofill(workloads: Workloads, hardware: Hardware) -> Workloads:
    """Return the table with each blank replaced by the fastest choice that fits into memory.

    If no choice fits, take the choice that needs the least memory.
    """
    open_rows = np.flatnonzero(has_open_choices(workloads))
    if not len(open_rows):
        return workloads
    row, micro, chunks, kinds, shares = _choices(workloads, open_rows)
    tried = workloads.take(row).replace(
        micro_batch_size=micro, num_chunks=chunks, recompute=kinds, recompute_share=shares
    )
    memory = predict_memory(tried, hardware).total
    available = USABLE_SHARE * rows_hardware(tried, hardware).memory_bytes
    seconds = predict_step(tried, hardware).total
    # Choices that do not fit rank after all choices that fit, ordered by their bytes.
    rank = np.where(memory <= available, seconds, 1e9 * (1 + memory / available))
    columns = {
        "micro_batch_size": workloads.micro_batch_size.copy(),
        "num_chunks": workloads.num_chunks.copy(),
        "recompute": workloads.recompute.astype("<U16"),
        "recompute_share": workloads.recompute_share.copy(),
    }
    for index in open_rows:
        mine = np.flatnonzero(row == index)
        best = mine[np.argmin(rank[mine])]
        columns["micro_batch_size"][index] = micro[best]
        columns["num_chunks"][index] = chunks[best]
        columns["recompute"][index] = kinds[best]
        columns["recompute_share"][index] = shares[best]
    return workloads.replace(**columns)


def _choices(
    workloads: Workloads, open_rows: NDArray[np.int_]
) -> tuple[NDArray[np.int_], FloatArray, FloatArray, NDArray[np.str_], FloatArray]:
    """Return all combinations: row, micro batch, chunks, recomputation, recomputed share."""
    found: list[tuple[int, float, float, str, float]] = []
    for index in open_rows:
        micro = float(workloads.micro_batch_size[index])
        chunks = float(workloads.num_chunks[index])
        kind = str(workloads.recompute[index])
        sizes = _micro_batch_sizes(workloads, index) if np.isnan(micro) else [micro]
        counts = _chunk_counts(workloads, index) if np.isnan(chunks) else [chunks]
        kinds = [(kind, float(workloads.recompute_share[index]))]
        if kind == "":
            kinds = [("none", 1.0), ("modules", 1.0)]
            kinds += [("full", share) for share in RECOMPUTE_SHARES]
            if not workloads.flash_attention[index]:
                kinds.append(("selective", 1.0))
        found += [
            (int(index), size, count, *kind)
            for size, count, kind in itertools.product(sizes, counts, kinds)
        ]
    rows, micro_batches, chunk_counts, names, shares = zip(*found, strict=True)
    return (
        np.array(rows),
        np.array(micro_batches),
        np.array(chunk_counts),
        np.array(names),
        np.array(shares),
    )


def _micro_batch_sizes(workloads: Workloads, index: int) -> list[float]:
    per_rank = workloads.global_batch_size[index] / workloads.data_size[index]
    if _is_torch_pipeline(workloads, index):
        return [max(per_rank // workloads.pipeline_size[index], 1.0)]
    sizes = [float(size) for size in MICRO_BATCH_SIZES if per_rank % size == 0]
    if per_rank % 1 == 0:
        return sizes
    # A published batch that was rounded need not divide over the replicas.
    return [float(size) for size in MICRO_BATCH_SIZES if size <= max(per_rank, 1)]


def _chunk_counts(workloads: Workloads, index: int) -> list[float]:
    """Return the numbers of chunks that divide the layers of a stage.

    The embedding and the head may count as one layer each. Interleaving needs at least as many
    micro batches as stages.
    """
    stages, layers = workloads.pipeline_size[index], workloads.num_layers[index]
    if _is_torch_pipeline(workloads, index):
        return [2.0] if workloads.must_interleave[index] else [1.0]
    counts = [
        float(count)
        for count in range(2, MAX_CHUNKS + 1)
        if layers % (stages * count) == 0 or (layers + 2) % (stages * count) == 0
    ]
    if not workloads.must_interleave[index] or not counts:
        counts.append(1.0)
    return counts


def _is_torch_pipeline(workloads: Workloads, index: int) -> bool:
    """Return whether PyTorch's pipelining runs the row.

    Its defaults fill the blanks: as many micro batches as stages, and two interleaved chunks.
    """
    return bool(workloads.software[index] == "fsdp" and workloads.pipeline_size[index] > 1)
