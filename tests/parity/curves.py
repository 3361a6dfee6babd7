"""Draw the losses of every stage of sharding over 50 steps: `python -m tests.parity.curves`.

One process, and stages 0 to 3 on two and four replicas, alone and with tensor and pipeline
parallelism, learn five batches by heart: the curves must be on each other. `--picture FILE.svg`
draws them, and below them how far each is from one process. Exits with status 1 if a loss differs
by more than `LIMIT`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from tests.harness.distributed import run_distributed
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.training_case import train

MODEL = ModelCase("llama", True, 0.1)
LIMIT = 1e-4
"""Relative. The sums of a step differ by some 1e-7 in other layouts; 50 steps of AdamW, which
divides by the size of small gradients, make a hundred times as much of it."""
WIDTH, HEIGHT, LEFT = 640, 240, 60
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")

Curves = dict[LayoutCase, list[float]]


def all_cases(max_ranks: int) -> list[LayoutCase]:
    """Return one process, and every stage in each layout of up to `max_ranks` ranks."""
    layouts = [
        {"dp": 2},
        {"dp": 4},
        {"dp": 2, "tp": 2, "sp": True},
        {"dp": 2, "pp": 2, "vp": 2},
        {"dp": 2, "tp": 2, "sp": True, "pp": 2},
    ]
    cases = [LayoutCase(**axes, stage=stage) for axes in layouts for stage in range(4)]
    return [LayoutCase(), *(case for case in cases if case.world_size <= max_ranks)]


def losses(layout: LayoutCase, num_steps: int) -> list[float]:
    """Train and return the loss of each step."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "vp": layout.vp}
    ranks = run_distributed(
        train, layout.world_size, layout, MODEL, None, num_steps, timeout_s=600.0, **sizes
    )
    return next(rank.losses for rank in ranks if rank.losses)


def differences(curve: list[float], serial: list[float]) -> list[float]:
    """Return how far each loss is from that of one process, relative."""
    return [abs(ours / theirs - 1) for ours, theirs in zip(curve, serial, strict=True)]


def picture(curves: Curves) -> str:
    """Return an SVG document: the curves on each other, and their distances from one process."""
    serial = curves[LayoutCase()]
    apart = {layout: differences(curve, serial) for layout, curve in curves.items()}
    parts = [
        *panel(curves, max(serial), "loss", 20),
        *panel(apart, LIMIT, "difference from one process, relative", HEIGHT + 60),
    ]
    for stage, colour in enumerate(COLOURS):
        place = f'x="{LEFT + 20 + 90 * stage}" y="{2 * HEIGHT + 90}" fill="{colour}"'
        parts.append(f"<text {place}>stage {stage}</text>")
    size = f'width="{LEFT + WIDTH + 20}" height="{2 * HEIGHT + 110}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([head, *parts, "</svg>\n"])


def panel(curves: Curves, top: float, title: str, offset: int) -> list[str]:
    """Return one line per curve, between 0 and `top`."""
    frame = f'x="{LEFT}" y="{offset}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<rect {frame} fill="none" stroke="#888"/>',
        f'<text x="{LEFT}" y="{offset - 6}">{title}</text>',
        f'<text x="4" y="{offset + 10}">{top:.3g}</text>',
        f'<text x="4" y="{offset + HEIGHT}">0</text>',
    ]
    for layout, values in curves.items():
        step = WIDTH / max(1, len(values) - 1)
        points = " ".join(
            f"{LEFT + step * i:.1f},{offset + HEIGHT * (1 - value / top):.2f}"
            for i, value in enumerate(values)
        )
        colour = COLOURS[layout.stage] if layout.world_size > 1 else "#000"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    return parts


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    steps: int = 50
    """Steps of each run."""
    max_ranks: int = 8
    """Largest world size."""
    only: tuple[str, ...] = ("",)
    """Layouts with this in their name."""
    picture: str | None = None
    """File for a picture, .svg."""


def main() -> int:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    curves: Curves = {}
    print(f"{'layout':<28}{'first loss':>12}{'last loss':>12}{'largest difference':>20}")
    worst = 0.0
    for layout in all_cases(options.max_ranks):
        if layout != LayoutCase() and not any(part in str(layout) for part in options.only):
            continue
        curves[layout] = curve = losses(layout, options.steps)
        largest = max(differences(curve, curves[LayoutCase()]))
        worst = max(worst, largest)
        print(f"{layout!s:<28}{curve[0]:>12.5f}{curve[-1]:>12.5f}{largest:>20.1e}", flush=True)
        if options.picture:
            Path(options.picture).write_text(picture(curves))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
