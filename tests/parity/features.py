"""Print how far features are from one process in every layout: `python -m tests.parity.features`.

The clip of query and key weights, muP, gated attention, and every module whose activations can be
recomputed or offloaded, each in all of `LAYOUTS`: every axis alone, every stage of ZeRO, and
several axes together on 4 and 8 ranks. A cell is two steps (or `--steps`), compared as in
`tests.parity.table`. A layout that has ranks of experts gets the feature's model with experts.
Where a rule refuses a combination the table has its text, and the cell is that settings are refused
so. Exits with status 1 if any error exceeds its tolerance, or a refusal is another.
"""

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.core.foundation.errors import ConfigError
from megatron.core.settings.command_line import read_command_line
from megatron.core.transformer.config.precision import OFFLOAD_MODULES, RECOMPUTE_MODULES
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import FIGURES, errors_of, exceeds, figures
from tests.parity.training_case import transformer_config

_SAMPLES = 4
LAYOUTS: dict[str, LayoutCase] = {
    name: LayoutCase(samples=_SAMPLES, **axes)
    for name, axes in {
        "tp": dict(tp=2),
        "sp": dict(tp=2, sp=True),
        # More tensor-parallel ranks than key heads, whose rows are then on several ranks.
        "tp 4": dict(tp=4, sp=True),
        "pp": dict(pp=2),
        "vpp": dict(pp=2, vp=2),
        "zero bubble": dict(pp=2, schedule="zb-h1"),
        "cp": dict(cp=2),
        "cp a2a": dict(cp=2, cp_kind="a2a"),
        "ep": dict(dp=2, ep=2),
        "ep in turns": dict(dp=2, ep=2, combined=True),
        "etp": dict(tp=2, sp=True, expt_tp=2),
        "ep etp": dict(tp=2, sp=True, dp=2, ep=2, expt_tp=2),
        "dp": dict(dp=2),
        "zero 1": dict(dp=2, stage=1),
        "zero 2": dict(dp=2, stage=2),
        "zero 3": dict(dp=2, stage=3),
        "fsdp2": dict(dp=2, fsdp2=True),
        "tp pp dp": dict(tp=2, sp=True, pp=2, vp=2, dp=2),
        "tp pp zero 1, experts": dict(tp=2, sp=True, pp=2, vp=2, dp=2, ep=2, expt_tp=2, stage=1),
        "pp cp zero 2": dict(pp=2, vp=2, cp=2, dp=2, stage=2),
        "tp cp zero 3": dict(tp=2, sp=True, cp=2, dp=2, stage=3),
        "cp zero 3, experts": dict(cp=2, dp=2, ep=2, stage=3),
    }.items()
}
"""Every layout that a feature is shown in."""

COMPOSITE = ("tp pp zero 1, experts", "pp cp zero 2", "tp cp zero 3")
"""Layouts in which every two of tensor, pipeline and context parallelism meet, and each stage of
ZeRO, expert and expert-tensor parallelism are there: the part that is a test."""


@dataclass(frozen=True)
class Feature:
    """What must not depend on the layout.

    Attributes:
        model: has it.
        with_experts: has it and experts.
        recomputed: modules that the layout, but not the one process, computes again.
        offloaded: modules whose activations the layout, but not the one process, offloads.
        refused: name of a layout -> how the problem begins for which its settings are refused.
    """

    model: ModelCase
    with_experts: ModelCase
    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


_DENSE = ModelCase("llama", False, 0.1, layers=4)
_LATENT = ModelCase("latent", False, 0.1, packed=True, layers=4)
_EXPERTS = replace(_DENSE, experts="deepseek")
_LATENT_EXPERTS = replace(_LATENT, experts="deepseek")
_CLIPPED = 0.05
"""Attention logit that is exceeded."""
_MODELS_OF = {"mla_up_proj": (_LATENT, _LATENT_EXPERTS)} | dict.fromkeys(
    ("moe", "moe_act", "shared_experts", "expert_fc1"), (_EXPERTS, _EXPERTS)
)
"""Module that only some models have -> those."""
_REFUSED = {"moe": {"ep in turns": "overlap_moe_expert_parallel_comm with recomputed"}}

FEATURES: dict[str, Feature] = (
    {
        "qk-clip": Feature(
            replace(_DENSE, largest_logit=_CLIPPED),
            replace(_DENSE, experts="dropless", largest_logit=_CLIPPED),
        ),
        "qk-clip of latents": Feature(
            replace(_LATENT, largest_logit=_CLIPPED),
            replace(_LATENT_EXPERTS, largest_logit=_CLIPPED),
        ),
        "muP": Feature(
            ModelCase("gpt2", True, 0.1, base_width=8, layers=4),
            replace(_EXPERTS, base_width=8, later_tokens=1),
        ),
        "gated attention": Feature(
            replace(_DENSE, gated=True), replace(_DENSE, experts="dropless", gated=True)
        ),
        "gated attention of latents": Feature(
            replace(_LATENT, gated=True),
            replace(_LATENT_EXPERTS, gated=True),
        ),
    }
    | {
        f"recompute {module}": Feature(
            *_MODELS_OF.get(module, (_DENSE, _EXPERTS)), (module,), refused=_REFUSED.get(module, {})
        )
        for module in RECOMPUTE_MODULES
    }
    | {
        f"offload {module}": Feature(
            *_MODELS_OF.get(module, (_DENSE, _EXPERTS)),
            offloaded=(module,),
        )
        for module in (*OFFLOAD_MODULES, "layers")
    }
)
"""Every feature; a module that becomes one of `RECOMPUTE_MODULES` or `OFFLOAD_MODULES` becomes one
of them."""

JOINED: dict[str, Feature] = {
    name: feature
    for name, feature in FEATURES.items()
    if not (feature.recomputed or feature.offloaded)
} | {
    "offload all of experts": Feature(_EXPERTS, _EXPERTS, offloaded=OFFLOAD_MODULES),
    "recompute all of experts": Feature(
        _EXPERTS, _EXPERTS, ("moe_act", "shared_experts", "layernorm", "core_attn")
    ),
    "recompute all of latents": Feature(
        _LATENT, _LATENT_EXPERTS, ("mla_up_proj", "core_attn", "layernorm", "mlp")
    ),
}
"""The same with modules that are recomputed together: the part that is a test."""


@dataclass(frozen=True)
class Cell:
    """A feature in a layout; `refused` is the text of the rule that refuses it."""

    feature: str
    layout_name: str
    model: ModelCase
    layout: LayoutCase
    refused: str | None

    def __str__(self) -> str:
        return f"{self.feature}: {self.layout_name}"


def cells(features: Mapping[str, Feature], names: Sequence[str]) -> list[Cell]:
    """Return the cells of features in the layouts of these names."""
    found = []
    layouts = {name: LAYOUTS[name] for name in names}
    for feature_name, feature in features.items():
        for name, layout in layouts.items():
            has_experts = layout.ep * layout.expt_tp > 1
            found.append(
                Cell(
                    feature_name,
                    name,
                    feature.with_experts if has_experts else feature.model,
                    replace(layout, recomputed=feature.recomputed, offloaded=feature.offloaded),
                    feature.refused.get(name),
                )
            )
    return found


def refusal(cell: Cell) -> str | None:
    """Return the problems for which the settings of a cell are refused; None if they are not."""
    try:
        transformer_config(cell.layout, cell.model)
    except ConfigError as error:
        return "\n".join(problem.found for problem in error.problems or (error,))
    return None


def wrong_refusal(cell: Cell) -> str | None:
    """Return how what is refused differs from what the table says; None if it does not."""
    found = refusal(cell)
    agrees = found is None if cell.refused is None else (found or "").startswith(cell.refused)
    return None if agrees else f"{cell}: refused with {found}, in the table {cell.refused}"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    features: str = ""
    """Only features whose name begins so, e.g. "recompute"."""
    layouts: str = ""
    """Only layouts that have this in their name."""
    steps: int = 2
    """Optimizer steps of a cell."""


def main() -> int:
    """Print the table; return the exit status."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    chosen = {n: f for n, f in FEATURES.items() if n.startswith(options.features)}
    names = tuple(name for name in LAYOUTS if options.layouts in name)
    started, failures, num_cells = time.time(), [], 0
    width = max(map(len, LAYOUTS)) + 2
    for feature in chosen:
        print(f"\n{feature:<{width}}{FIGURES}", flush=True)
        for cell in cells({feature: chosen[feature]}, names):
            num_cells += 1
            problem = wrong_refusal(cell)
            if problem is not None or cell.refused is not None:
                failures += [problem] * (problem is not None)
                print(f"{cell.layout_name:<{width}}  refused: {cell.refused}", flush=True)
                continue
            try:
                errors = errors_of(cell.layout, cell.model, options.steps)
            except Exception:
                failures.append(f"{cell}: {traceback.format_exc(limit=-1)}")
                print(f"{cell.layout_name:<{width}}  FAILED", flush=True)
                continue
            print(f"{cell.layout_name:<{width}}{figures(errors)}", flush=True)
            failures += [f"{cell}: {what}" for what in exceeds(errors)]
    print(f"\n{num_cells} cells in {time.time() - started:.0f} s, {len(failures)} failed")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
