"""Print the key figures of a run and draw its curves.

    python tools/report.py run                       # prints, and writes run/report.png
    python tools/report.py run --against other_run   # draws both runs

RUN is a directory with the files of a run, or a file of --metrics-jsonl. The curves come from
--metrics-jsonl or --tensorboard-dir; settings, checkpoints and failures from --save.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megatron.core.foundation import optional_imports
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from megatron.training.metrics.log_line import duration
from megatron.training.reports import MEDIANS, RunRecord, read_run


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Runs to report."""

    run: Path = positional(metavar="RUN")
    """Directory of a run, or its file of --metrics-jsonl."""
    against: Path | None = None
    """Another run, whose curves are drawn, too."""
    out: Path | None = None
    """Picture: .png, .svg or .pdf. Default: report.png in the directory of the run."""


def key_figures(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the figures of a run."""
    goal = run.settings.get("train_iters", "")
    yield "steps", f"{run.last_step} of {goal}" if goal.isdigit() else str(run.last_step)
    for name, series in run.series.items():
        if name in run.losses or name.endswith((" validation", " test")):
            best = min(series.finite(), default=float("nan"))
            yield name, f"{series.values[-1]:.5g} (lowest {best:.5g})"
    for name, title, factor in MEDIANS:
        if name in run.series:
            yield title, f"{run.series[name].median() * factor:.4g} (median)"
    if run.wall_s > 0:
        yield "wall time", duration(run.wall_s)
        yield "goodput", f"{100 * run.goodput:.1f} % of the wall time in steps that count"
    for attempt in run.attempts if len(run.attempts) > 1 else ():
        yield "attempt", f"steps {attempt.first_step} to {attempt.last_step}"
    for failure in run.failures:
        what = str(failure.get("message", "")).partition("\n")[0][:100]
        yield "failure", f"{failure.get('class')} at step {failure.get('iteration')}: {what}"
    for saved in run.checkpoints[-3:]:
        when = datetime.fromtimestamp(saved.time)
        size = saved.num_bytes / 2**20
        yield "checkpoint", f"step {saved.iteration}, {size:.1f} MiB, {when:%Y-%m-%d %H:%M}"


def draw(runs: Sequence[RunRecord], out: Path) -> None:
    """Draw losses, gradient norm, learning rate and the speed of all runs.

    A dashed line marks the first step of an attempt after a failure.
    """
    figures = optional_imports.require("matplotlib.figure", purpose="tools/report.py")
    losses = dict.fromkeys(name for run in runs for name in run.losses)
    panels = {name: (name, 1.0) for name in (*losses, "grad-norm", "learning-rate")}
    panels |= {name: (title, factor) for name, title, factor in MEDIANS}
    shown = [name for name in panels if any(name in run.series for run in runs)]
    num_rows = (len(shown) + 1) // 2
    figure = figures.Figure(figsize=(11, 2.8 * num_rows), layout="constrained")
    all_axes = figure.subplots(num_rows, 2, squeeze=False).flat
    for axes, name in zip(all_axes, shown, strict=False):
        title, factor = panels[name]
        for color, run in zip(("tab:blue", "tab:orange"), runs, strict=False):
            for kind, style in (("", "-"), (" validation", "o"), (" test", "s")):
                if series := run.series.get(name + kind):
                    values = [factor * value for value in series.values]
                    label = run.name + kind
                    axes.plot(series.steps, values, style, color=color, ms=4, lw=1, label=label)
            for attempt in run.attempts[1:]:
                axes.axvline(attempt.first_step, color=color, linestyle="--", alpha=0.5)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if name in losses or len(runs) > 1:
            axes.legend(fontsize="small")
    for axes in all_axes:
        axes.remove()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Print and draw; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    runs = [read_run(path) for path in (options.run, options.against) if path is not None]
    for run in runs:
        print(run.name)
        for name, value in key_figures(run):
            print(f"  {name:24} {value}")
    directory = options.run if options.run.is_dir() else options.run.parent
    out = options.out or directory / "report.png"
    draw(runs, out)
    print(f"wrote {out}")
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
