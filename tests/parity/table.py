"""Print how far every layout is from one process: `python -m tests.parity.table`.

For each model (GPT-2-like and Llama-like, tied and untied, without and with dropout) and each
layout it trains 5 steps (or `--steps`) on the same weights and data, and compares the loss of every
step, every gradient of the first and last step, the gradient norm of every step, and all weights at
the end.
Exits with status 1 if any error exceeds its named tolerance.
"""

import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_AFTER_OPTIMIZER, FP32_REORDERED_SUM, Tolerance
from tests.parity.compare import Errors, compare
from tests.parity.layouts import (
    LayoutCase,
    ModelCase,
    all_layouts,
    all_models,
    zero_bubble_layouts,
)
from tests.parity.training_case import NUM_STEPS, RankReport, Run, assemble, train

Case = tuple[ModelCase, LayoutCase]
CasesUpTo = Callable[[int], Sequence[Case]]
"""Cases of up to so many ranks."""
FIGURES = f"{'loss':>10}{'gradient':>10}{'grad norm':>11}{'weight':>10}  worst gradient"


def run_case(
    layout: LayoutCase,
    model: ModelCase,
    num_steps: int = NUM_STEPS,
    job: Callable[..., RankReport] = train,
) -> Run:
    """Train in `layout` on worker processes, each with `job`, and return the assembled model."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "vp": layout.vp, "cp": layout.cp}
    sizes |= {"ep": layout.ep, "expt_tp": layout.expt_tp}
    sizes["num_distributed_optimizer_instances"] = layout.instances
    if layout.levels:
        sizes["hierarchical_cp"] = list(layout.levels)
    reports = run_distributed(
        job, layout.world_size, layout, model, None, num_steps, timeout_s=180.0, **sizes
    )
    return assemble(reports)


serial_run = functools.cache(run_case)


def errors_of(layout: LayoutCase, model: ModelCase, num_steps: int = NUM_STEPS) -> Errors:
    """Train in a layout and compare with one process."""
    serial = serial_run(layout.serial, model, num_steps)
    return compare(run_case(layout, model, num_steps), serial)


def exceeds(errors: Errors) -> list[str]:
    """Return which errors are above their tolerance."""
    limits: list[tuple[str, float, Tolerance]] = [
        ("loss", errors.loss, FP32_REORDERED_SUM),
        ("gradient", errors.gradient, FP32_REORDERED_SUM),
        ("grad norm", errors.grad_norm, FP32_REORDERED_SUM),
        ("weight", errors.weight, FP32_AFTER_OPTIMIZER),
        ("routers", errors.routers, FP32_REORDERED_SUM),
    ]
    return [f"{name} {value:.1e}" for name, value, limit in limits if value > limit.rtol]


def assert_equals_one_process(layout: LayoutCase, model: ModelCase) -> None:
    """Train two steps in a layout, an update between them; no error may exceed its tolerance."""
    errors = errors_of(layout, model, num_steps=2)
    assert not exceeds(errors), errors


def figures(errors: Errors) -> str:
    """Format the errors of one line."""
    return (
        f"{errors.loss:>10.1e}{errors.gradient:>10.1e}{errors.grad_norm:>11.1e}"
        f"{errors.weight:>10.1e}  {errors.worst_gradient}"
    )


def every_model_in(
    models: Iterable[ModelCase], layouts: Callable[[int], Sequence[LayoutCase]]
) -> CasesUpTo:
    """Return the cases of a table in which every model meets every layout."""
    return lambda max_ranks: [(m, layout) for m in models for layout in layouts(max_ranks)]


def print_table(cases: Sequence[Case], num_steps: int = NUM_STEPS) -> int:
    """Train every case so many steps and print its errors, under a heading for each model.

    Returns:
        The exit status: 1 if a case failed, or an error exceeds its tolerance.
    """
    width = max(len(str(layout)) for _, layout in cases) + 2
    started, failures = time.time(), []
    by_model = sorted(cases, key=lambda case: str(case[0]))
    for model, of_model in groupby(by_model, key=lambda case: case[0]):
        print(f"\n{model}\n{'layout':<{width}}{FIGURES}", flush=True)
        for _, layout in of_model:
            try:
                errors = errors_of(layout, model, num_steps)
            except Exception:
                failures.append(f"{model} | {layout}: {traceback.format_exc(limit=-1)}")
                print(f"{layout!s:<{width}}  FAILED", flush=True)
                continue
            print(f"{layout!s:<{width}}{figures(errors)}", flush=True)
            failures += [f"{model} | {layout}: {what}" for what in exceeds(errors)]
    print(f"\n{len(cases)} cases in {time.time() - started:.0f} s, {len(failures)} above tolerance")
    print("\n".join(failures))
    return 1 if failures else 0


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    models: str = ""
    """Only models whose name begins so, e.g. "llama tied"."""
    max_ranks: int = 8
    """Largest world size."""
    stage: int | None = flag(None, choices=(0, 1, 2, 3))
    """Only this sharding stage."""
    steps: int = NUM_STEPS
    """Optimizer steps of a case."""


def run_command(title: str, cases_up_to: Mapping[str, CasesUpTo], default: str = "all") -> int:
    """Print the table that the command line asks for; return the exit status."""

    @dataclass(frozen=True, kw_only=True)
    class FlagsWithLayouts(Flags):
        layouts: str = flag(default, choices=sorted(cases_up_to))
        """Which layouts to run."""

    options = read_command_line(FlagsWithLayouts, description=title)
    cases = [
        (model, layout)
        for model, layout in cases_up_to[options.layouts](options.max_ranks)
        if str(model).startswith(options.models) and options.stage in (None, layout.stage)
    ]
    if not cases:
        print("no case is left of these layouts and models", file=sys.stderr)
        return 2
    return print_table(cases, options.steps)


CASES = {
    "all": every_model_in(all_models(), all_layouts),
    "zero-bubble": every_model_in(all_models(), zero_bubble_layouts),
}

if __name__ == "__main__":
    sys.exit(run_command(__doc__.splitlines()[0], CASES))
