"""A run in a terminal while it goes on: where it stands, its curves, what went wrong last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.foundation.optional_imports import require
from megatron.training.metrics.log_line import duration
from megatron.training.reports.line_chart import quantity
from megatron.training.reports.run_charts import GRAD_NORM, LEARNING_RATE, THROUGHPUT, TOKEN_RATE
from megatron.training.reports.run_page import description_of, key_figures, status_of
from megatron.training.reports.run_record import RunRecord
from megatron.training.reports.scalar_files import STEP_TIME

_PURPOSE = "tools/watch.py"
_BLOCKS = "▁▂▃▄▅▆▇█"
_LOST = "×"
_COLOURS = {"good": "green", "warn": "yellow", "bad": "bold red"}
_LATE = 10.0
"""Times the median step without a new one after which the run is said to be silent."""
_SHARE = "-share"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as blocks of eight heights, the mean of neighbours in each.

    What is not finite is a cross, also among neighbours that are.
    """
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    means = [sum(block) / len(block) for block in _chunks(values, size)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((mean - low) * scale)] if math.isfinite(mean) else _LOST for mean in means
    )


def _chunks(values: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    # From the end: the newest column has as many steps as the others.
    first = len(values) % size
    if first:
        yield values[:first]
    for begin in range(first, len(values), size):
        yield values[begin : begin + size]


def seconds_left(run: RunRecord) -> float:
    """Return the time of the steps that are left, as long as the newest; nan if unknown."""
    goal = run.number("train_iters")
    if goal is None or STEP_TIME not in run.series:
        return math.nan
    recent = run.series[STEP_TIME].values[-100:]
    return max(goal - run.last_step, 0) * sum(recent) / len(recent)


def silence(run: RunRecord, now: float) -> str:
    """Return for how long there has been no step, if that is long for this run.

    Args:
        now: seconds since 1970.
    """
    if not run.attempts or status_of(run)[1] != "warn":
        return ""
    since_s = now - run.attempts[-1].end
    is_late = since_s > max(_LATE * run.series[STEP_TIME].median(), 5.0)
    return f"no step for {duration(since_s)}" if is_late else ""


def frame(run: RunRecord, *, now: float, width: int) -> Any:
    """Return what is on the screen, for `rich` to print.

    Args:
        now: seconds since 1970.
        width: columns.
    Raises:
        MissingExtraError: rich is not installed.
    """
    console, panel, table, text, bars = (
        require(f"rich.{name}", purpose=_PURPOSE)
        for name in ("console", "panel", "table", "text", "progress_bar")
    )
    status, kind = status_of(run)
    head = text.Text.assemble((f"{status} ", _COLOURS[kind]), (description_of(run), "dim"))
    parts: list[Any] = [head]
    goal = run.number("train_iters")
    if goal:
        left = seconds_left(run)
        remark = f" {100 * run.last_step / goal:.1f}%, {duration(left)} left" if left >= 0 else ""
        line = table.Table.grid(expand=True)
        line.add_column(ratio=1)
        line.add_column(justify="right")
        line.add_row(bars.ProgressBar(total=goal, completed=run.last_step), text.Text(remark))
        parts.append(line)
    if quiet := silence(run, now):
        parts.append(text.Text(quiet, style=_COLOURS["warn"]))
    parts += [_curves(run, table, text, width), _figures(run, table, text)]
    if run.failures:
        newest = run.failures[-1]
        what = str(newest.get("message", "")).partition("\n")[0]
        failure = (
            f"last failure: {newest.get('class')} at iteration {newest.get('iteration')}: {what}"
        )
        parts.append(text.Text(failure, style="red", overflow="ellipsis", no_wrap=True))
    return panel.Panel(console.Group(*parts), title=text.Text(run.name, style="bold"), width=width)


def _curves(run: RunRecord, table: Any, text: Any, width: int) -> Any:
    """Return a row for each curve: name, newest value, and its shape over the newest steps."""
    grid = table.Table(box=None, show_header=False, padding=(0, 1), expand=True)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True)
    columns = max(width - 45, 10)
    names = [name for name in run.losses if not name.startswith("experts/")]
    for name in dict.fromkeys(
        (*names, GRAD_NORM, LEARNING_RATE, TOKEN_RATE, THROUGHPUT, STEP_TIME)
    ):
        if name in run.series:
            values = run.series[name].values
            shape = sparkline(values[-40 * columns :], columns)
            grid.add_row(name, quantity(values[-1]), text.Text(shape, style="blue"))
    for name in run.series:
        if name.endswith(_SHARE):
            share = run.series[name].values[-1]
            bar = "█" * round(share * columns)
            grid.add_row(name.removesuffix(_SHARE).replace("-", " "), f"{100 * share:.1f}%",
                         text.Text(bar, style="magenta"))  # fmt: skip
    return grid


def _figures(run: RunRecord, table: Any, text: Any) -> Any:
    """Return the key figures of the report, in two columns."""
    grid = table.Table.grid(padding=(0, 2), expand=True)
    cells = [
        text.Text.assemble((f"{what}: ", "dim"), value, (f"  {remark}", "dim"))
        for what, value, remark in key_figures(run)
    ]
    for left, right in zip(cells[::2], [*cells[1::2], text.Text("")], strict=False):
        grid.add_row(left, right)
    return grid


def watch(
    read: Callable[[], RunRecord], *, interval_s: float, is_over: Callable[[RunRecord], bool]
) -> None:
    """Show a run until it is over, or Ctrl-C.

    Args:
        read: reads the run. After it, ten times as long as it took is waited, at least.
        interval_s: seconds between two frames.
        is_over: whether nothing more will come.
    """
    console = require("rich.console", purpose=_PURPOSE).Console()
    live = require("rich.live", purpose=_PURPOSE).Live(console=console, auto_refresh=False)
    with live:
        while True:
            began = time.monotonic()
            run = read()
            took_s = time.monotonic() - began
            live.update(frame(run, now=time.time(), width=console.width), refresh=True)
            if is_over(run):
                return
            time.sleep(max(interval_s, 10.0 * took_s))
