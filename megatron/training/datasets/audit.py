"""A record of the samples that a run consumed, and what it proves.

Each replica appends a line for every micro batch that training took: the number of its first
sample, counted over the whole run, and a checksum of the tokens of each sample. Whatever happened
in between (resumes, other layouts, other numbers of workers), one number must always have the same
checksum, and no number may be missing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import DataError


def audited(
    batches: Iterable[Any], folder: str, *, first_sample: int, row_size: int, dp_rank: int
) -> Iterator[Any]:
    """Yield `batches` and record each as it is taken.

    Args:
        folder: created if needed; the file of this replica is appended to.
        first_sample: number of the first sample of the first batch.
        row_size: distance of the first samples of two batches.
    """
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"dp{dp_rank:05d}.jsonl"), "a", buffering=1) as file:
        for number, batch in enumerate(batches):
            sums = [zlib.crc32(row.numpy().tobytes()) for row in batch["tokens"].contiguous()]
            file.write(json.dumps([first_sample + number * row_size, sums]) + "\n")
            yield batch


@dataclass(frozen=True)
class Audit:
    """What the records of a run say."""

    num_samples: int
    """Different samples that were consumed."""
    num_repeated: int
    """Times a sample was consumed again, with the same tokens: steps lost to a crash."""
    missing: list[tuple[int, int]]
    """Ranges [first, last] below the largest number that nobody consumed."""
    contradictions: list[int]
    """Samples that had other tokens the second time."""


def read_audit(folder: str) -> Audit:
    """Read the records of all replicas.

    Raises:
        DataError: there are none, or a line is no record (the last of a file may be cut off).
    """
    paths = sorted(Path(folder).glob("dp*.jsonl"))
    if not paths:
        raise DataError(
            f"{folder} holds no record of samples.",
            rule="a run with --data-audit-path writes one file for each replica",
            flags=["--data-audit-path"],
        )
    seen: dict[int, int] = {}
    repeated, contradictions = 0, []
    for path in paths:
        for first, sums in _records(path):
            for number, checksum in enumerate(sums, first):
                if number not in seen:
                    seen[number] = checksum
                elif seen[number] == checksum:
                    repeated += 1
                else:
                    contradictions.append(number)
    numbers = sorted(seen)
    missing = [(0, numbers[0] - 1)] if numbers and numbers[0] else []
    missing += [(a + 1, b - 1) for a, b in zip(numbers, numbers[1:], strict=False) if b - a > 1]
    return Audit(len(seen), repeated, missing, sorted(contradictions))


def _records(path: Path) -> Iterator[tuple[int, list[int]]]:
    lines = path.read_text().split("\n")
    for at, line in enumerate(lines):
        if not line:
            continue
        try:
            first, sums = json.loads(line)
        except ValueError:
            # A killed process leaves half a line; its successor continues after it.
            if at < len(lines) - 2 and not line.startswith("["):
                raise DataError(f"{path}, line {at + 1}: not a record.") from None
            continue
        yield int(first), list(sums)
