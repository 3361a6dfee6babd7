"""Record the samples that a run consumes, and check the record.

Each replica appends a line for every micro batch of training: the number of its first sample in the
whole run, and a checksum of the tokens of each sample. After resumes with any layouts and numbers
of workers, a number must always have the same checksum, and no number may be missing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron.core.foundation.errors import DataError


def record_samples(
    folder: str, dp_rank: int, first_sample: int, batch: Mapping[str, Tensor]
) -> None:
    """Append a line for a micro batch to the file of this replica.

    Args:
        folder: an existing directory.
        first_sample: number of the first sample of the micro batch in the run.
    """
    sums = [zlib.crc32(sample.numpy().tobytes()) for sample in batch["tokens"].contiguous()]
    with open(os.path.join(folder, f"dp{dp_rank:05d}.jsonl"), "a") as file:
        file.write(json.dumps([first_sample, sums]) + "\n")


@dataclass(frozen=True)
class Audit:
    """The result of reading the records of a run."""

    num_samples: int
    """Number of different consumed samples."""
    num_repeated: int
    """Number of repetitions of a sample with the same tokens, in steps repeated after a crash."""
    missing: list[tuple[int, int]]
    """Ranges [first, last] of missing numbers below the largest number."""
    contradictions: list[int]
    """Samples with different tokens in a repetition."""


def read_audit(folder: str) -> Audit:
    """Read the records of all replicas.

    Raises:
        DataError: there is no record, or a line is invalid (the last line of a file may be cut).
    """
    paths = sorted(Path(folder).glob("dp*.jsonl"))
    if not paths:
        raise DataError(
            f"{folder} contains no record of samples.",
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
            # A killed process may leave half a line; the next process appends to it.
            if at < len(lines) - 2 and not line.startswith("["):
                raise DataError(f"{path}, line {at + 1}: not a record.") from None
            continue
        yield int(first), list(sums)
