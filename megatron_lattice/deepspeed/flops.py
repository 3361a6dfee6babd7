"""`flops_profiler`: floating-point operations of one forward pass, module by module.

Counted as torch dispatches them: products, convolutions and attention, two for a multiplication
with an addition. Elementwise work does not count, and times are not shown, as counting changes
them: `wall_clock_breakdown` shows those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_lattice.deepspeed.settings import EngineSettings


class FlopsProfiler:
    """Counts one forward pass of a module.

    Args:
        module: what is called.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.by_module: dict[str, int] = {}

    def count(self, call: Callable[[], object]) -> Any:
        """Call, and count what it does; return its result."""
        with FlopCounterMode(display=False) as counter:
            result = call()
        root = type(self.module).__name__
        found: dict[str, int] = {}
        for name, kinds in counter.get_flop_counts().items():
            path = name.removeprefix(root).removeprefix(".")
            found[path] = max(found.get(path, 0), sum(kinds.values()))
        found[""] = counter.get_total_flops()
        found.pop("Global", None)
        self.by_module = found
        return result

    @property
    def total(self) -> int:
        """Operations of the pass that was counted last."""
        return self.by_module.get("", 0)

    def report(self, depth: int = -1, top: int = 1, detailed: bool = True) -> str:
        """Return a table.

        Args:
            depth: of modules in the table; -1 is all.
            top: modules in the list of the largest at that depth.
            detailed: show the table of all modules as well.
        """
        parameters = sum(p.numel() for p in self.module.parameters())
        lines = [
            "flops profiler: one forward pass of this process",
            f"  parameters:                {parameters:,}",
            f"  forward operations:        {self.total:,}",
            f"  multiplications with sums: {self.total // 2:,}",
            f"  forward and backward:      about {3 * self.total:,}",
        ]
        modules = [(p, n) for p, n in self.by_module.items() if p]
        deepest = max((p.count(".") + 1 for p, _ in modules), default=0)
        wanted = deepest if depth < 0 else depth
        level = [(p, n) for p, n in modules if p.count(".") + 1 == wanted]
        largest = sorted(level, key=lambda each: -each[1])[:top]
        lines += [f"  largest at depth {wanted}: {p}: {_share(n, self.total)}" for p, n in largest]
        if detailed:
            lines += [
                f"  {'  ' * p.count('.')}{p}: {_share(n, self.total)}"
                for p, n in modules
                if p.count(".") + 1 <= wanted
            ]
        return "\n".join(lines)


def _share(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / max(total, 1):.1f} %)"


def print_profile(profiler: FlopsProfiler, settings: EngineSettings) -> None:
    """Print the report as the configuration asks, or write it to its file."""
    text = profiler.report(
        settings["flops_profiler.module_depth"],
        settings["flops_profiler.top_modules"],
        settings["flops_profiler.detailed"],
    )
    path = settings["flops_profiler.output_file"]
    if path:
        with open(path, "w") as file:
            file.write(text + "\n")
        text = f"flops profiler: written to {path}"
    print(text, flush=True)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: tuple[object, ...] | Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    **_: object,
) -> tuple[Any, Any, Any]:
    """Return (operations, multiplications with sums, parameters) of one forward pass."""
    if input_shape is not None:
        args = (torch.ones(input_shape),)
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        profiler.count(lambda: model(*args, **(kwargs or {})))
    text = profiler.report(module_depth, top_modules, detailed)
    if output_file:
        with open(output_file, "w") as file:
            file.write(text + "\n")
    elif print_profile:
        print(text, flush=True)
    numbers = profiler.total, profiler.total // 2, sum(p.numel() for p in model.parameters())
    return tuple(f"{n:,}" for n in numbers) if as_string else numbers  # type: ignore[return-value]
