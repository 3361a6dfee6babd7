"""Balance of the tokens routed to experts, as log lines and scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.load_balancing import AUX_LOSS_NAMES, LoadSummary, routers_of
from megatron.core.transport.object_collectives import all_gather_object

Loads = list[tuple[LoadSummary, dict[str, float]]]
"""(load in the last step, balance losses) of each layer with experts, in order."""


def collect_loads(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> Loads:
    """Return the loads of all layers of the model, on every rank.

    Communication: with pipeline stages, one all-gather of small Python objects over `pp`.
    """
    own: Loads = []
    for router in routers_of(model):
        summary = LoadSummary.of(router.load)
        if summary is not None:
            own.append((summary, router.load.step_losses))
    return sorted(_over_stages(own, groups), key=lambda load: load[0].layer_number)


def first_bad_router(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> str:
    """Return a sentence about the first layer with router logits that are not finite, or "".

    Communication: see `collect_loads`.
    """
    own = [r.load.layer_number for r in routers_of(model) if not r.load.step_is_finite]
    bad = _over_stages(own, groups)
    if not bad:
        return ""
    return (
        f" The router of layer {min(bad)} is the first with logits that are not finite: inspect its"
        " weight and the layers before it."
    )


def _over_stages(own: list[Any], groups: ProcessGroupCollection) -> list[Any]:
    """Concatenate the lists of all pipeline stages."""
    return [entry for entries in all_gather_object(own, groups.pp) for entry in entries]


def balance_losses(loads: Loads) -> dict[str, float]:
    """Return name -> mean of a balance loss over layers, without its coefficient."""
    sums: dict[str, list[float]] = {}
    for _, losses in loads:
        for name, value in losses.items():
            sums.setdefault(AUX_LOSS_NAMES[name], []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def load_scalars(loads: Loads) -> dict[str, float]:
    """Return the scalars of all layers."""
    scalars = balance_losses(loads)
    for load, losses in loads:
        name = f"experts/layer {load.layer_number}"
        scalars[f"{name} lowest load"] = load.lowest
        scalars[f"{name} median load"] = load.median
        scalars[f"{name} highest load"] = load.highest
        scalars[f"{name} dropped"] = load.dropped
        scalars |= {f"{name} {AUX_LOSS_NAMES[n]}": value for n, value in losses.items()}
    return scalars


def load_line(iteration: int, loads: Loads) -> str:
    """Return one line with the loads of the last step, as multiples of the even share."""
    layers = []
    for load, _ in loads:
        figures = load.lowest, load.median, load.p90, load.highest
        lost = f" ({100 * load.dropped:.1f}% dropped)" if load.dropped else ""
        layers.append(f"{load.layer_number}: " + "/".join(f"{x:.2f}" for x in figures) + lost)
    head = f" iteration {iteration:8d} | tokens of experts, lowest/median/p90/highest of even"
    return " | ".join([head, *layers]) + " |"


def layer_lines(iteration: int, loads: Loads) -> list[str]:
    """Return a line for each layer, with its balance losses."""
    lines = []
    for load, losses in loads:
        cells = [f" iteration {iteration:8d} | layer {load.layer_number}"]
        cells += [f"{AUX_LOSS_NAMES[name]}: {value:.6E}" for name, value in losses.items()]
        cells.append(f"lowest load: {load.lowest:.3f} | median: {load.median:.3f}")
        cells.append(f"p90: {load.p90:.3f} | highest: {load.highest:.3f}")
        cells.append(f"dropped: {100 * load.dropped:.2f}%")
        lines.append(" | ".join(cells) + " |")
    return lines
