"""Global batch sizes that change with the number of consumed samples. Pure integers, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Phases = Sequence[tuple[int, int]]
"""(first sample of the phase, global batch size), ascending, starting at sample 0."""

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_phases(text: str, seq_length: int) -> Phases:
    """Read "0:16 2.4B:320 4.8B:1536": pairs (first token of a phase, global batch size).

    Args:
        text: numbers of tokens may end in K, M, B or T, for thousands, millions and so on.
        seq_length: tokens of a sample. A phase begins with the first step after its first token.
    Raises:
        ValueError: with the reason, as a clause that follows the text.
    """
    phases: list[tuple[int, int]] = []
    for word in text.replace(",", " ").split():
        tokens, sign, size = word.partition(":")
        unit = _UNITS.get(tokens[-1:].upper(), 1)
        try:
            begin = Fraction(tokens if unit == 1 else tokens[:-1]) * unit
            phases.append((-(-begin // seq_length), int(size)))
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"holds {word!r}, which is not TOKENS:SIZE") from None
    begins = [begin for begin, _ in phases]
    if not phases or begins[0] != 0:
        raise ValueError("does not begin with 0:SIZE")
    if begins != sorted(set(begins)):
        raise ValueError(f"has numbers of tokens that do not rise by samples of {seq_length}")
    if min(size for _, size in phases) < 1 or max(begins) > 2**53:
        raise ValueError("has a size below 1, or a number of tokens that no run reaches")
    return tuple(phases)


def size_in_phases(consumed_samples: int, phases: Phases) -> int:
    """Return the global batch size of the step that begins after `consumed_samples`."""
    return [size for begin, size in phases if begin <= consumed_samples][-1]


def steps_in_phases(num_samples: int, phases: Phases) -> int:
    """Return how many whole steps fit into `num_samples`."""
    steps = consumed = 0
    for (_, size), end in zip(phases, [*(begin for begin, _ in phases[1:]), None], strict=True):
        if end is None or end >= num_samples:
            return steps + max(num_samples - consumed, 0) // size
        count = max(-(-(end - consumed) // size), 0)
        steps, consumed = steps + count, consumed + count * size
    return steps


def samples_in_phases(num_steps: int, phases: Phases) -> int:
    """Return how many samples `num_steps` steps consume."""
    consumed = 0
    for (_, size), end in zip(phases, [*(begin for begin, _ in phases[1:]), None], strict=True):
        count = num_steps if end is None else min(max(-(-(end - consumed) // size), 0), num_steps)
        num_steps, consumed = num_steps - count, consumed + count * size
    return consumed
