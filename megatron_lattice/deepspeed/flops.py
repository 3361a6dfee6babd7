"""`flops_profiler`: floating-point operations of one forward pass, module by module.

`torch.utils.flop_counter` counts products, convolutions and attention as torch dispatches them; a
multiplication with an addition counts as two. Counting slows the pass down, so no times are shown:
`wall_clock_breakdown` prints times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def count_flops(module: nn.Module, call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Call a function and count its operations.

    Returns:
        (result of the call, path of each module below `module` -> operations; "" is the total).
    """
    with FlopCounterMode(display=False) as counter:
        result = call()
    root = type(module).__name__
    found: dict[str, int] = {}
    for name, kinds in counter.get_flop_counts().items():
        path = name.removeprefix(root).removeprefix(".")
        found[path] = max(found.get(path, 0), sum(kinds.values()))
    found.pop("Global", None)
    return result, found | {"": counter.get_total_flops()}


def print_profile(
    module: nn.Module,
    flops: Mapping[str, int],
    *,
    depth: int = -1,
    top: int = 1,
    detailed: bool = True,
    path: str | None = None,
) -> None:
    """Print a report of `count_flops`, or write it to a file.

    Args:
        depth: maximum depth of the modules in the report; -1 means all.
        top: number of modules in the list of the largest modules at that depth.
        detailed: list all modules as well.
        path: file to write; None prints the report.
    """
    total = flops[""]
    lines = [
        "flops profiler: one forward pass of this process",
        f"  parameters:                {sum(p.numel() for p in module.parameters()):,}",
        f"  forward operations:        {total:,}",
        f"  multiplications with sums: {total // 2:,}",
        f"  forward and backward:      about {3 * total:,}",
    ]
    depths = {name: name.count(".") + 1 for name in flops if name}
    wanted = max(depths.values(), default=0) if depth < 0 else depth
    shown = {n: f"{n}: {flops[n]:,} ({100 * flops[n] / max(total, 1):.1f} %)" for n in depths}
    largest = sorted((n for n in depths if depths[n] == wanted), key=lambda n: -flops[n])[:top]
    lines += [f"  largest at depth {wanted}: {shown[name]}" for name in largest]
    if detailed:
        lines += [f"{'  ' * d}{shown[name]}" for name, d in depths.items() if d <= wanted]
    text = "\n".join(lines)
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
    with torch.no_grad():
        _result, flops = count_flops(model, lambda: model(*args, **(kwargs or {})))
    if print_profile or output_file:
        _print_profile(
            model, flops, depth=module_depth, top=top_modules, detailed=detailed, path=output_file
        )
    numbers = flops[""], flops[""] // 2, sum(p.numel() for p in model.parameters())
    return tuple(f"{n:,}" for n in numbers) if as_string else numbers  # type: ignore[return-value]


_print_profile = print_profile  # `get_model_profile` has an argument of that name
