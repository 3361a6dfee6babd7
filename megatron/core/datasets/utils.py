"""Names that callers import from Megatron's `datasets.utils`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np

from megatron.core.datasets.native import compile_helpers
from megatron.core.foundation.errors import ConfigError

__all__ = ["Blend", "Split", "compile_helpers", "get_blend_from_list", "normalize"]

Blend = tuple[list[str], list[float] | None]
"""Path prefixes, and their weights if any were given."""


class Split(Enum):
    """The three parts of a corpus; the value is the position in every list of three."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: Sequence[float]) -> list[float]:
    """Scale weights to a sum of 1 in double precision.

    Raises:
        ConfigError: a weight is not a positive number.
    """
    values = np.array(weights, np.float64)
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if len(bad):
        raise ConfigError(
            f"weight {weights[bad[0]]} of a blend is not a positive number.",
            rule="each dataset of a blend needs a weight above zero",
            flags=["--data-path"],
            fix="remove that dataset from the blend, or give it a weight",
        )
    scaled: list[float] = (values / np.sum(values)).tolist()
    return scaled


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Read the value of `--data-path`.

    If the number of entries is even and every second one, from the first on, is a number, the
    entries are alternating weights and prefixes. Otherwise all of them are prefixes.

    Returns:
        (prefixes, weights or None), or None for None.
    """
    if blend is None:
        return None
    entries = [str(entry).strip() for entry in blend]
    if len(entries) % 2 == 0 and all(map(_is_number, entries[0::2])):
        return entries[1::2], [float(weight) for weight in entries[0::2]]
    return entries, None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
