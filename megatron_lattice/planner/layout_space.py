"""Every layout of a model on a number of GPUs that the program can run, as one table.

A layout is left out if a size does not divide. Each reason is counted, so that the report
can list the layouts that the search did not compute.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.autofill import MICRO_BATCH_SIZES
from megatron_lattice.planner.workload import Workloads

UNEQUAL_CHUNKS = (1, 2, 4, 8)
RECOMPUTE_QUARTERS = (1, 2, 3, 4)
"""Quarters of a chunk's layers that are recomputed, rounded up to layers."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Allowed values of each axis; an empty tuple allows all values."""

    tensor_size: tuple[int, ...] = ()
    pipeline_size: tuple[int, ...] = ()
    context_size: tuple[int, ...] = ()
    expert_size: tuple[int, ...] = ()
    expert_tensor_size: tuple[int, ...] = ()
    num_chunks: tuple[int, ...] = ()
    micro_batch_size: tuple[int, ...] = ()
    sharding_stage: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    has_stages: bool = False
    """The settings of the run determine the layers of each stage."""


@dataclass(frozen=True)
class LayoutSpace:
    """Layouts that divide, and the number of splits that do not divide, by reason."""

    table: Workloads
    refused: Counter[str]


@dataclass(frozen=True)
class _Ranks:
    """Sizes of the axes of the process grid."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int


def layout_space(model: Workloads, choices: Choices) -> LayoutSpace:
    """Return all layouts of a model.

    Args:
        model: one row: the columns of the model, the batch and the GPUs are read.
        choices: values that are fixed.
    """
    refused: Counter[str] = Counter()
    found = [
        (
            ranks.tensor, ranks.pipeline, ranks.context, ranks.expert, ranks.expert_tensor,
            ranks.data, micro_batch, chunks, stage, kind, share,
        )
        for ranks in _grids(model, choices, refused)
        for micro_batch, chunks in _batches(model, choices, ranks, refused)
        for stage in _sharding_stages(choices, ranks)
        for kind, share in _recomputations(model, choices, ranks.pipeline, chunks)
    ]  # fmt: skip
    return LayoutSpace(_table(model, found), refused)


LAYOUT_COLUMNS = (
    "tensor_size", "pipeline_size", "context_size", "expert_size", "expert_tensor_size",
    "data_size", "micro_batch_size", "num_chunks", "sharding_stage", "recompute", "recompute_share",
)  # fmt: skip


def _table(model: Workloads, found: Sequence[tuple[float | str, ...]]) -> Workloads:
    rows = model.take(np.zeros(len(found), dtype=np.int_))
    if not found:
        return rows
    columns = {
        name: np.array(values, dtype=str if name == "recompute" else np.float64)
        for name, values in zip(LAYOUT_COLUMNS, zip(*found, strict=True), strict=True)
    }
    columns["sequence_parallel"] = np.where(columns["tensor_size"] > 1, 1.0, 0.0)
    is_whole = model.num_attention_heads / columns["tensor_size"] % columns["context_size"] == 0
    columns["exchanges_heads"] = model.exchanges_heads * is_whole
    columns["may_interleave"] = columns["must_interleave"] = np.where(
        columns["num_chunks"] > 1, 1.0, 0.0
    )
    return rows.replace(**columns)


def _number(column: np.ndarray) -> int:
    return int(column[0])


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def _grids(model: Workloads, choices: Choices, refused: Counter[str]) -> Iterator[_Ranks]:
    world, seq_length = _number(model.world_size), _number(model.seq_length)
    batch = _number(model.global_batch_size)
    splits = divisors(world)
    for tp, pp in itertools.product(choices.tensor_size or splits, choices.pipeline_size or splits):
        reason = _why_not_split(model, tp)
        if reason:
            refused[reason] += 1
            continue
        for cp in choices.context_size or splits:
            if world % (tp * pp * cp):
                refused["the GPUs are no multiple of tensor x pipeline x context"] += 1
                continue
            data = world // (tp * pp * cp)
            if (cp > 1 and seq_length % (2 * cp)) or seq_length // cp % tp:
                refused["the sequence does not divide over context and tensor"] += 1
            elif batch % data:
                refused["the global batch does not divide over the replicas"] += 1
            else:
                for ep, etp in _expert_grids(model, choices, tp, refused):
                    if world % (pp * ep * etp):
                        refused["the GPUs are no multiple of the ranks of the experts"] += 1
                    else:
                        yield _Ranks(tp, pp, cp, ep, etp, data)


def _why_not_split(model: Workloads, tp: int) -> str:
    """Return which size tensor parallelism does not divide; empty if it divides all."""
    heads, groups = _number(model.num_attention_heads), _number(model.num_query_groups)
    if heads % tp or (groups % tp and tp % groups):
        return "the attention heads do not divide over tensor"
    if _number(model.ffn_hidden_size) % tp:
        return "the feed-forward does not divide over tensor"
    return ""


def counted_layers(num_layers: int, num_stages: int) -> int | None:
    """Return the number of layers to divide over stages.

    The loss, then the embedding, count as one layer each if the layers alone do not divide. None
    if no count divides.
    """
    for extra in (0, 1, 2):
        total = num_layers + extra
        if total % num_stages == 0 and (extra == 0 or num_stages > 1):
            return total
    return None


def layers_of_chunk(num_layers: int, num_stages: int) -> int:
    """Return the layers of the largest of so many stages."""
    return -(-(counted_layers(num_layers, num_stages) or num_layers) // num_stages)


def stage_layers(num_layers: int, num_stages: int, num_chunks: int) -> list[int]:
    """Return the layers of each chunk, in model order, as equal as possible for each rank.

    The last rank, which has the output layer, gets fewer where the layers do not divide.
    """
    layers = [num_layers // (num_stages * num_chunks)] * (num_stages * num_chunks)
    for extra in range(num_layers - sum(layers)):
        # Rank by rank; each time around, the next chunk.
        layers[extra] += 1
    return layers


def _expert_grids(
    model: Workloads, choices: Choices, tp: int, refused: Counter[str]
) -> Iterator[tuple[int, int]]:
    experts = _number(model.num_experts)
    if not experts:
        yield 1, tp
        return
    for ep in choices.expert_size or divisors(experts):
        if experts % ep:
            refused["the experts do not divide over their ranks"] += 1
            continue
        for etp in choices.expert_tensor_size or sorted({1, tp}):
            if _number(model.moe_ffn_hidden_size) % etp:
                refused["an expert does not divide over tensor"] += 1
            else:
                yield ep, etp


def _batches(
    model: Workloads, choices: Choices, ranks: _Ranks, refused: Counter[str]
) -> Iterator[tuple[int, int]]:
    """Yield micro batches and chunks."""
    per_rank = _number(model.global_batch_size) // ranks.data
    layers = _number(model.num_layers)
    most = -(-layers // ranks.pipeline) if ranks.pipeline > 1 else 1
    for micro in choices.micro_batch_size or MICRO_BATCH_SIZES:
        if per_rank % micro:
            refused["a replica's samples do not divide into micro batches"] += 1
            continue
        # Chunks of unequal size are tried where no equal ones halve the layers of a stage.
        is_uneven = counted_layers(layers, 2 * ranks.pipeline) is None
        for chunks in choices.num_chunks or range(1, most + 1):
            is_equal = counted_layers(layers, ranks.pipeline * chunks) is not None
            if layers < ranks.pipeline * chunks and not is_equal:
                refused["a stage needs a layer"] += 1
            elif not (is_equal or choices.has_stages or is_uneven and chunks in UNEQUAL_CHUNKS):
                refused["the layers do not divide over the chunks"] += 1
            elif chunks > 1 and ranks.pipeline == 1:
                refused["chunks divide the work of pipeline ranks"] += 1
            elif chunks > 1 and per_rank // micro < ranks.pipeline:
                refused["chunks need as many micro batches as pipeline ranks"] += 1
            else:
                yield micro, chunks


def _sharding_stages(choices: Choices, ranks: _Ranks) -> tuple[int, ...]:
    """Return the ZeRO stages: above 1 only without a pipeline.

    In a pipeline, gradients of several micro batches and chunks are open at the same time, so
    gathered parameters and unsharded gradients stay in memory: sharding them saves no memory and
    adds messages.
    """
    if choices.sharding_stage:
        return choices.sharding_stage
    if ranks.data * ranks.context == 1:
        return (0,)
    return (1,) if ranks.pipeline > 1 else (1, 2, 3)


def _recomputations(
    model: Workloads, choices: Choices, num_stages: int, num_chunks: int
) -> list[tuple[str, float]]:
    kinds = choices.recompute or ("none", "layernorm", "activations", "mlp", "full")
    if not choices.recompute and not model.is_moe[0]:
        kinds = tuple(kind for kind in kinds if kind != "activations")  # the norms are all of them
    if not choices.recompute and not model.flash_attention[0]:
        kinds = ("none", "selective", *kinds[1:])  # a fused kernel keeps no scores to recompute
    found = [(kind, 1.0) for kind in kinds if kind != "full"]
    if "full" in kinds:
        per_chunk = layers_of_chunk(_number(model.num_layers), num_stages * num_chunks)
        layers = {-(-per_chunk * quarter // 4) for quarter in RECOMPUTE_QUARTERS}
        found += [("full", count / per_chunk) for count in sorted(layers)]
    return found
