"""A case: a command line, on how many ranks it runs, and how it is drawn."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.parity.random_layouts.layouts import LAYOUT_FLAGS, draw_layout
from tests.parity.random_layouts.models import MODEL
from tests.parity.random_layouts.settings import Settings, draw_all, from_words, to_words
from tests.parity.random_layouts.training import FIXED, TRAINING

LAYOUTS_PER_MODEL = 4
"""Layouts that are compared with one run of one process."""


@dataclass(frozen=True)
class Case:
    """One command line."""

    ranks: int
    is_wide: bool
    """fp64 stands for fp32, and fp32 for the half precisions."""
    settings: Settings

    @property
    def serial(self) -> Case:
        """The same model and training in one process."""
        kept = {n: v for n, v in self.settings.items() if n not in LAYOUT_FLAGS}
        return replace(self, ranks=1, settings=kept)

    def has(self, wanted: str) -> bool:
        """Return whether a flag is there: NAME, or NAME=VALUE as it is written."""
        name, _, value = wanted.partition("=")
        return name in self.settings and value in ("", str(self.settings[name]))

    def without(self, *names: str) -> Case:
        """Return the case without these flags."""
        return replace(self, settings={n: v for n, v in self.settings.items() if n not in names})

    def with_value(self, name: str, value: object) -> Case:
        """Return the case with another value of a flag."""
        return replace(self, settings={**self.settings, name: value})

    def __str__(self) -> str:
        """The form of `former_failures.txt`, which `read` reads."""
        wide = "wide" if self.is_wide else "plain"
        return f"{self.ranks} {wide} | " + " ".join(_quoted(to_words(self.settings)))

    @staticmethod
    def read(line: str) -> Case:
        """Read what `str` wrote."""
        head, _, words = line.partition("|")
        ranks, wide = head.split()
        return Case(int(ranks), wide == "wide", from_words(shlex.split(words)))

    def command(self) -> str:
        """Return the command that a user would type."""
        words = " ".join(_quoted(to_words(self.settings)))
        start = "python" if self.ranks == 1 else f"torchrun --nproc-per-node {self.ranks}"
        return f"{start} pretrain_gpt.py {words}"


def _quoted(words: list[str]) -> list[str]:
    return [shlex.quote(word) for word in words]


def draw_model(seed: int, index: int) -> list[Case]:
    """Return the cases of the model with this number under a seed: always the same ones."""
    rng = random.Random(f"{seed}/{index}")
    model: Settings = {}
    draw_all(MODEL, model, rng)
    model |= FIXED
    draw_all(TRAINING, model, rng)
    # State in other precisions is stored as bytes, whose number per value the optimizer knows.
    is_wide = index % 3 != 0 and "use-precision-aware-optimizer" not in model
    is_wide |= "fp8-format" in model or "fp4-format" in model
    is_half = "bf16" in model or "fp16" in model
    if "adam-eps" in model and (is_half or not is_wide):
        # Adam moves a weight whose gradient is small by lr / eps of what rounding to fp32, or to
        # what stands for a half precision, makes of that gradient.
        model["adam-eps"] = 1e-3
    cases = []
    for _ in range(LAYOUTS_PER_MODEL):
        ranks, layout = draw_layout(model, is_wide, rng)
        cases.append(Case(ranks, is_wide, {**model, **layout}))
    return cases


def draw_cases(seed: int, count: int, *, having: Sequence[str] = ()) -> Iterator[list[Case]]:
    """Yield the cases of one model after the other, `count` in all.

    Args:
        having: flags that every case has, without dashes: NAME, or NAME=VALUE.
    """
    index = 0
    while count > 0:
        cases = [c for c in draw_model(seed, index) if all(map(c.has, having))][:count]
        if cases:
            yield cases
        count, index = count - len(cases), index + 1
