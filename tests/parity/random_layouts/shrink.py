"""Make a failing command line small: drop flags, ranks and sizes while it fails alike."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.parity.random_layouts.cases import Case
from tests.parity.random_layouts.layouts import CP, EP, ETP, PP, TP
from tests.parity.random_layouts.outcomes import Verdict
from tests.parity.random_layouts.settings import number

Judge = Callable[[Case], Verdict]

NEEDED = frozenset((
    "num-layers", "hidden-size", "num-attention-heads", "seq-length", "vocab-size",
    "tokenizer-type", "mock-data", "num-workers", "log-interval", "distributed-backend",
    "micro-batch-size", "global-batch-size", "train-iters", "eval-iters", "lr",
    "adam-eps",
))  # fmt: skip
"""Flags without which nothing runs, all runs wait for long, or rounding decides the signs of the
first updates: another failure."""

SMALLER = (
    ("num-layers", (2,)),
    ("hidden-size", (32,)),
    ("num-attention-heads", (4,)),
    ("seq-length", (16,)),
    ("global-batch-size", (4, 8)),
    ("micro-batch-size", (1,)),
    ("train-iters", (1, 2)),
    ("eval-iters", (0, 1)),
)


def shrink(verdict: Verdict, judge: Judge, most: int = 80) -> Verdict:
    """Return the smallest case found that fails with the same signature.

    Args:
        judge: runs a case, and one process beside it.
        most: runs that this may take.
    """
    left = most
    best = verdict

    def fails(case: Case) -> bool:
        nonlocal left, best
        if left <= 0 or case == best.case:
            return False
        left -= 1
        found = judge(case)
        if found.signature != verdict.signature:
            return False
        best = found
        return True

    while True:
        before = best.case
        _drop_flags(lambda: best.case, fails)
        for case in _smaller(lambda: best.case):
            fails(case)
        if best.case == before or left <= 0:
            return best


def _drop_flags(current: Callable[[], Case], fails: Callable[[Case], bool]) -> None:
    """Drop as many flags at a time as goes, halving the number when none can go."""
    size = max(1, len(current().settings) // 2)
    while True:
        names = [name for name in reversed(current().settings) if name not in NEEDED]
        for begin in range(0, len(names), size):
            fails(current().without(*names[begin : begin + size]))
        if size == 1:
            return
        size //= 2


def _smaller(current: Callable[[], Case]) -> Iterator[Case]:
    """Yield cases of fewer ranks, and with smaller values; each is tried once."""
    for axis in (TP, PP, CP, EP, ETP, ""):
        case = current()
        size = number(case.settings, axis) if axis else 2
        for factor in (2, 3):
            if size % factor == 0 and case.ranks % factor == 0 and case.ranks > factor:
                fewer = replace(current(), ranks=case.ranks // factor)
                left = {axis: size // factor} if axis and size > factor else {}
                yield replace(fewer.without(axis), settings={**fewer.without(axis).settings,
                                                             **left})  # fmt: skip
    if "data-path" in current().settings:
        yield current().without("data-path").with_value("mock-data", True)
    for name, values in SMALLER:
        for value in values:
            if number(current().settings, name, 0) > value:
                yield current().with_value(name, value)
                break
