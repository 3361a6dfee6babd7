"""Report of a search: the choice, its cost, and why other layouts lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.planner.autofill import SAFE_SHARE
from megatron_lattice.planner.hardware import rows_hardware
from megatron_lattice.planner.layout_search import EQUALLY_GOOD, SearchResult, what_would_fit
from megatron_lattice.planner.layout_space import Choices
from megatron_lattice.planner.memory import GIB, predict_memory
from megatron_lattice.planner.predictor import Predictor
from megatron_lattice.planner.step_time import Parts, predict_step
from megatron_lattice.planner.workload import Workloads

NAMES = {
    "tensor_size": "tensor", "pipeline_size": "pipeline", "context_size": "context",
    "expert_size": "expert", "data_size": "data", "micro_batch_size": "micro batch",
    "num_chunks": "chunks", "sharding_stage": "ZeRO", "recompute": "recompute",
}  # fmt: skip

NUM_OTHERS = 4
"""Number of other values of an axis that are shown."""


@dataclass(frozen=True)
class Chosen:
    """A layout that the rules of a run allow."""

    index: int
    """Row of the search."""
    settings: Mapping[str, Any]


def layout_text(table: Workloads, row: int) -> str:
    """Return a layout in one line."""
    words = []
    for column, name in NAMES.items():
        value = getattr(table, column)[row]
        if column == "recompute":
            if value != "none":
                words.append(f"recompute {_recompute_text(table, row)}")
        elif value != 1 or column in ("tensor_size", "pipeline_size", "data_size"):
            words.append(f"{name} {value:.0f}")
    return ", ".join(words)


def _recompute_text(table: Workloads, row: int) -> str:
    kind, share = str(table.recompute[row]), float(table.recompute_share[row])
    if kind != "full":
        return kind
    return "all layers" if share == 1 else f"{100 * share:.0f}% of the layers"


def report(
    found: SearchResult,
    chosen: Sequence[Chosen],
    predictor: Predictor,
    *,
    flops: float,
    refused: int,
    has_details: bool = False,
) -> str:
    """Return the report of a search.

    Args:
        chosen: the best layouts, the fastest first.
        flops: of a step, causal attention.
        refused: layouts that a rule of a run refuses.
        has_details: add the parts of the step and the reasons against other layouts.
    """
    indices = np.array([each.index for each in chosen])
    table, seconds = found.table.take(indices), found.seconds[indices]
    hardware = rows_hardware(table, predictor.hardware)
    off, compared = predictor.interval(table), found.compared[indices]
    peak = table.world_size * hardware.peak_16_bit_flops
    lines = [
        f"{table.world_size[0]:.0f} {table.gpu[0]} of {hardware.memory_bytes[0] / GIB:.0f} GiB:"
        f" {len(found.table)} layouts divide, {len(found.order)} of them fit",
        f"{'s/step':>10}{'nine of ten runs':>20}{'GiB':>7}{'MFU':>8}  layout",
    ]
    for row in range(len(chosen)):
        group = "=" if compared[row] <= compared.min() * (1 + EQUALLY_GOOD) else " "
        kind = "" if found.caution[indices[row]] == 1 else ", no measured run of this kind"
        interval = f"{seconds[row] / off[row]:.3f} to {seconds[row] * off[row]:.3f}"
        lines.append(
            f"{group}{seconds[row]:>9.3f}{interval:>20}{found.memory[indices[row]] / GIB:>7.1f}"
            f"{100 * flops / peak[row] / seconds[row]:>7.1f}%  {layout_text(table, row)}{kind}"
        )
    kind = "a model with experts" if table.is_moe[0] else "a dense model"
    like = predictor.correction.similarity(table, predictor.hardware)[0]
    tokens = float(table.global_batch_size[0] * table.seq_length[0])
    lines.append(
        f"= equally good: half of all predictions are farther off; interval of {kind},"
        f" {100 * like:.0f} % like its nearest measured run;"
        f" {tokens / seconds[0] / table.world_size[0]:.0f} tokens/s a GPU"
    )
    if too_large := _too_large(found):
        lines.append(f"does not fit: {', '.join(too_large)}")
    return "\n".join(
        [*lines, *(_details(found, chosen, predictor, refused) if has_details else ())]
    )


def _details(
    found: SearchResult, chosen: Sequence[Chosen], predictor: Predictor, refused: int
) -> list[str]:
    """Return the parts of the step, and why other layouts lost."""
    others = _other_choices(found, chosen[0].index)
    indices = np.array([each.index for each in chosen] + [row for _, _, row in others])
    table, seconds = found.table.take(indices), found.seconds[indices]
    parts = Parts.of(predict_step(table, predictor.hardware), seconds)
    lines = [
        f"MFU counts causal attention and no recomputation, over the peak of 16-bit products;"
        f" other rules of a run refuse {refused} of the first layouts",
        "parts of the first, s: "
        + ", ".join(f"{name} {column[0]:.3f}" for name, column in parts.columns.items()),
        "memory of the first, GiB: " + _memory_text(table, predictor),
        "why others lost: the best layout with another",
    ]
    for number, (axis, value, _) in enumerate(others):
        row = len(chosen) + number
        slower = 100 * (seconds[row] / seconds[0] - 1)
        why = parts.largest_excess(row, 0)
        lines.append(
            f"  {NAMES[axis] + ' ' + _value(value):<18}{seconds[row]:>9.3f} s {slower:>+7.1f}%"
            f"  {why}  ({layout_text(table, row)})"
        )
    if found.refused:
        lines.append("ways of splitting that cannot be:")
        lines += [f"  {count:>7}  {reason}" for reason, count in found.refused.most_common()]
    return lines


def _value(value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{value:.0f}"


def _other_choices(found: SearchResult, best: int) -> list[tuple[str, Any, int]]:
    """Return the fastest rows with another value of an axis, for the nearest values of each."""
    others = []
    for axis in NAMES:
        column = getattr(found.table, axis)
        rows = {
            value: found.best_with(axis, value)
            for value in np.unique(column[found.order]).tolist()
            if value != column[best] and axis != "data_size"
        }
        fastest = sorted(
            (float(found.seconds[row]), value, row)
            for value, row in rows.items()
            if row is not None
        )
        others += [
            (axis, value, row)
            for _, value, row in sorted(fastest[:NUM_OTHERS], key=lambda each: each[1])
        ]
    return others


def _too_large(found: SearchResult) -> list[str]:
    """Return the values without a layout that fits, with their least memory."""
    values = []
    for axis, name in NAMES.items():
        column = getattr(found.table, axis)
        fitting = set(np.unique(column[found.order]).tolist())
        for value in np.unique(column).tolist():
            if value not in fitting:
                least = found.memory[found.least_memory(axis, value)] / GIB
                values.append(f"{name} {_value(value)} ({least:.0f} GiB)")
    return values


def _memory_text(table: Workloads, predictor: Predictor) -> str:
    memory = predict_memory(table, predictor.hardware)
    parts = {
        "weights, gradients, optimizer": memory.states,
        "activations": memory.activations,
        "logits or a recomputed layer": memory.logits,
        "runtime and allocator": memory.overhead,
    }
    return ", ".join(f"{name} {column[0] / GIB:.1f}" for name, column in parts.items())


def refusal(
    found: SearchResult, model: Workloads, choices: Choices, predictor: Predictor
) -> ConfigError:
    """Return the error of a search without a layout that divides and fits."""
    world = int(model.world_size[0])
    if not len(found.table):
        reasons = [f"{reason} ({count})" for reason, count in found.refused.most_common(3)]
        return ConfigError(
            f"no layout of {world} GPUs divides: {'; '.join(reasons)}.",
            rule="heads, layers, sequence, batch and experts divide over their ranks",
            flags=["--global-batch-size", "--num-gpus"],
            fix="use a number of GPUs and a batch with more common divisors",
        )
    row = found.least_memory()
    least = found.table.take(np.array([row]))
    hardware = rows_hardware(least, predictor.hardware)
    ways = what_would_fit(model, choices, predictor)
    return ConfigError(
        f"none of {len(found.table)} layouts fits on {world} {model.gpu[0]}: the least is"
        f" {found.memory[row] / GIB:.0f} GiB of {hardware.memory_bytes[0] / GIB:.0f} with"
        f" {layout_text(least, 0)} ({_memory_text(least, predictor)}).",
        rule=f"a layout fits when it needs at most {100 * SAFE_SHARE:.0f} % of the GPU's memory",
        fix="any of: " + "; ".join(ways)
        if ways
        else "a smaller model, batch or sequence:"
        " neither more GPUs, larger ones nor offloading the optimizer is enough",
    )
