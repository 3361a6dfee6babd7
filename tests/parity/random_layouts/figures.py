"""The numbers of a log, each with the width of its last printed digit."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from megatron.training.hooks.times import PARTS

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:E[-+]\d+)?(?![\w.])")
_LINE = re.compile(r"^ (\[\d{4}-[^\]]*\] )?(iteration|validation loss)")
_OF_THE_MACHINE = (
    "elapsed time", "throughput", "tokens/s", "MFU", "ETA", *(f"{part}: " for part in PARTS),
)  # fmt: skip
_SCALARS_OF_THE_MACHINE = (
    "time", "iteration-time", "tokens-per-second-per-device", "throughput",
    "mem-max-allocated-bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One number, and where it stands."""

    name: str
    value: float
    unit: float = 0.0
    """What one in its last digit is worth; 0 if it has all digits."""


def figures_of_log(text: str) -> list[Figure]:
    """Return the numbers of the lines about steps and evaluations, but those of the machine."""
    found = []
    for line in text.splitlines():
        # Which gradient is the first that overflowed depends on the order of the layout.
        if not _LINE.match(line) or "step skipped:" in line:
            continue
        line = re.sub(r"^ \[\d{4}-[^\]]*\]", " ", line)
        for cell in line.split("|"):
            if any(words in cell for words in _OF_THE_MACHINE):
                continue
            name = _NUMBER.sub("#", cell).strip()
            for number in _NUMBER.findall(cell):
                digits = Decimal(number).as_tuple().exponent
                unit = 10.0**digits if "." in number and isinstance(digits, int) else 0.0
                found.append(Figure(name, float(number), unit))
    return found


def figures_of_scalars(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the exact numbers of --metrics-jsonl."""
    return [
        Figure(f"step {line['iteration']} {name}", float(value))
        for line in lines
        for name, value in line.items()
        if name not in _SCALARS_OF_THE_MACHINE and not name.endswith("-share")
    ]
