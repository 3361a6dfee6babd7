"""The attempts of a run, its failures and checkpoints: a picture over time, and tables."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from megatron.training.metrics.prediction import gibibytes
from megatron.training.reports.page import card_html, table_html
from megatron.training.reports.run_record import Attempt, RunRecord

_WIDTH, _LEFT = 1200, 8
_MAX_LISTED = 200
"""Attempts, failures or checkpoints that a table lists."""


def steps_taken_again(attempts: Sequence[Attempt]) -> list[int]:
    """Return how many steps of each attempt a later one took again."""
    lost = []
    for index, attempt in enumerate(attempts):
        resumed = min((later.first_step for later in attempts[index + 1 :]), default=math.inf)
        first = max(attempt.first_step, resumed)
        lost.append(max(0, int(attempt.last_step + 1 - min(first, attempt.last_step + 1))))
    return lost


def operation_html(run: RunRecord) -> list[str]:
    """Return the picture and the tables, as far as there is something in them."""
    again = steps_taken_again(run.attempts)
    attempts = [
        (
            str(number),
            f"{attempt.first_step:,} to {attempt.last_step:,}",
            f"{lost:,}",
            _stamp(attempt.begin),
            _stamp(attempt.end),
        )
        for number, (attempt, lost) in enumerate(zip(run.attempts, again, strict=True), 1)
    ]
    failures = [
        (
            _stamp(failure.get("time", math.nan)),
            str(failure.get("class", "")),
            str(failure.get("iteration", "")),
            f"{failure.get('rank', '')} on {failure.get('host', '')}",
            str(failure.get("where", "")),
            str(failure.get("message", "")).splitlines()[0] if failure.get("message") else "",
        )
        for failure in run.failures
    ]
    checkpoints = [
        (str(saved.iteration), _stamp(saved.time), gibibytes(saved.num_bytes), str(saved.path))
        for saved in run.checkpoints
    ]
    legend = (
        '<ul class="legend"><li class="c0"><i></i>steps</li><li style="--c:var(--warn)"><i></i>'
        'steps that were taken again</li><li style="--c:var(--bad)"><i></i>failure</li>'
        '<li style="--c:var(--good)"><i></i>checkpoint</li></ul>'
    )
    timeline = _timeline_svg(run)
    return [
        card_html(legend + timeline if timeline else ""),
        _listed("attempts", ("attempt", "steps", "taken again", "first step", "last step"),
                attempts, numbers=(2,)),
        _listed("failures", ("when", "class", "iteration", "rank", "where", "message"), failures),
        _listed("checkpoints", ("checkpoint", "saved", "size", "path"), checkpoints),
    ]  # fmt: skip


def _listed(
    what: str,
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    numbers: tuple[int, ...] = (),
) -> str:
    """Return the newest rows in a table, and say how many are left out."""
    left_out = len(rows) - _MAX_LISTED
    note = f'<p class="note">{left_out:,} earlier {what} are left out.</p>' if left_out > 0 else ""
    return card_html(table_html(head, rows[-_MAX_LISTED:], numbers=numbers), note)


def _stamp(time: object) -> str:
    if not isinstance(time, float | int) or not math.isfinite(time):
        return "unknown"
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def _timeline_svg(run: RunRecord) -> str:
    """Draw when attempts computed steps, failed and saved; nothing if the times are unknown."""
    attempts = run.attempts
    if not attempts or not all(math.isfinite(a.begin) for a in attempts):
        return ""
    begin, end = attempts[0].begin, max(attempts[-1].end, attempts[0].begin + 1.0)
    end = max([end, *(_time_of(f) for f in run.failures), *(c.time for c in run.checkpoints)])

    def x(time: float) -> float:
        return _LEFT + (time - begin) / (end - begin) * (_WIDTH - 2 * _LEFT)

    parts = [f'<rect class="axis" x="{_LEFT}" y="30" width="{_WIDTH - 2 * _LEFT}" height="2"/>']
    again = steps_taken_again(attempts)
    for number, (attempt, lost) in enumerate(zip(attempts, again, strict=True), 1):
        left, right = x(attempt.begin), max(x(attempt.end), x(attempt.begin) + 2)
        share = lost / (attempt.last_step + 1 - attempt.first_step)
        cut = right - share * (right - left)
        title = f"attempt {number}: steps {attempt.first_step} to {attempt.last_step}"
        parts.append(_bar("c0", left, cut, title))
        if lost:
            parts.append(_bar("again", cut, right, f"{lost} steps that were taken again"))
    for failure in run.failures:
        at, kind = _time_of(failure), html.escape(str(failure.get("class", "")))
        if begin <= at <= end:
            parts.append(
                f'<line class="failed" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="12" y2="48">'
                f"<title>{kind}</title></line>"
            )
    for saved in run.checkpoints:
        if begin <= saved.time <= end:
            parts.append(
                f'<circle class="saved" r="4.5" cx="{x(saved.time):.1f}" cy="55">'
                f"<title>checkpoint {saved.iteration}</title></circle>"
            )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        time = begin + share * (end - begin)
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        stamp = datetime.fromtimestamp(time).strftime("%m-%d %H:%M:%S")
        parts.append(f'<text x="{x(time):.1f}" y="78" text-anchor="{anchor}">{stamp}</text>')
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} 84" role="img" '
        f'aria-label="attempts over time">{"".join(parts)}</svg>'
    )


def _bar(kind: str, left: float, right: float, title: str) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="18" width="{max(right - left, 0.5):.1f}" '
        f'height="26" rx="3"><title>{html.escape(title)}</title></rect>'
    )


def _time_of(failure: Mapping[str, object]) -> float:
    time = failure.get("time")
    return float(time) if isinstance(time, float | int) else math.nan
