"""Few cases that stand for many: every two values of two axes meet in one of them.

Most faults of a combination need two of its parts; nothing is claimed for three at a time.
(D. R. Kuhn et al., "Software Fault Interactions and Implications for Software Testing", section 3,
IEEE TSE 30(6), 2004.)
"""

import random
from collections.abc import Iterable, Sequence
from itertools import combinations

from tests.parity.table import Case


def pairwise(cases: Sequence[Case], axes: Iterable[str], seed: int = 1) -> list[Case]:
    """Return few of the cases in which two values of two axes meet, wherever any case has both.

    Greedy, over a shuffled order: next comes the case that has the most pairs not yet seen.

    Args:
        axes: fields of a layout; the model, and how ranks share a sequence, are axes in any case.
    """
    shuffled = list(cases)
    random.Random(seed).shuffle(shuffled)
    names = list(axes)
    bits: dict[tuple, int] = {}
    pairs_of = [
        sum(
            1 << bits.setdefault(pair, len(bits)) for pair in combinations(_values(*case, names), 2)
        )
        for case in shuffled
    ]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(shuffled)), key=lambda i: (pairs_of[i] & missing).bit_count())
        chosen.append(shuffled[best])
        missing &= ~pairs_of[best]
    return chosen


def _values(model, layout, axes: Sequence[str]) -> list[tuple[str, str]]:
    """Return (axis, value) of every axis."""
    kind = f"{layout.cp} {layout.cp_kind}" if layout.cp > 1 else "1"
    named = ((axis, str(getattr(layout, axis))) for axis in axes)
    return [("model", str(model)), ("sequence", kind), *named]
