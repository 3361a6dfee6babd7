"""Rows that ranks share as they need: parity of every case, and how even the work is.

    python -m tests.parity.shared_rows

The first table compares each case with one process that pads every sample. The second deals the
lengths in bytes of Python's own source files (128 to 131,072 of them) to ranks, and sets that
beside rows of a fixed length, packed best-fit and split over all ranks: pairs of query and key,
work of the busiest rank over the mean, and tokens whose keys and values the ring sends.
"""

import random
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.datasets.packing import balance, pack
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.harness.pool import POOL
from tests.parity.shared_rows_case import CASES, errors_of

SHORTEST, LONGEST = 128, 131072
HIDDEN = 4096
"""Of the layer whose work is counted: as many key heads as query heads, an MLP of 4 times."""


def lengths_of_source_files(count: int, seed: int = 0) -> list[int]:
    """Return the lengths in bytes of files of Python's standard library, longer ones cut."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    found = [p.stat().st_size for p in paths if "site-packages" not in p.parts]
    lengths = [min(size, LONGEST) for size in found if size >= SHORTEST]
    return [LONGEST, *random.Random(seed).choices(lengths, k=count - 1)]


def pairs_of(length: int) -> int:
    """Return the pairs of a query and a key that it sees."""
    return length * (length + 1) // 2


def work_of_layer(length: int) -> float:
    """Return the multiplications of a layer for a sample."""
    return 12.0 * HIDDEN**2 * length + 2.0 * HIDDEN * pairs_of(length)


def fixed_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Return the lengths of the samples of each row of `LONGEST` tokens."""
    return [[lengths[i] for i in row] for row in pack(lengths, LONGEST)]


def work_of_zigzag(row: Sequence[int], num_ranks: int) -> list[float]:
    """Return the work of each rank on a row in which samples are told apart."""
    begins = [sum(row[:i]) for i in range(len(row))]
    chunk = LONGEST // (2 * num_ranks)

    def pairs_before(position: int) -> int:
        """Count the pairs of all queries before a position."""
        return sum(
            pairs_of(min(length, position - begin))
            for begin, length in zip(begins, row, strict=True)
            if begin < position
        )

    edges = [pairs_before(i * chunk) for i in range(2 * num_ranks + 1)]
    pairs = [edges[i + 1] - edges[i] for i in range(2 * num_ranks)]
    linear = 12.0 * HIDDEN**2 * chunk
    return [
        2 * linear + 2.0 * HIDDEN * (pairs[r] + pairs[2 * num_ranks - 1 - r])
        for r in range(num_ranks)
    ]


def print_balance(num_samples: int = 512) -> None:
    """Print the table of work."""
    lengths = lengths_of_source_files(num_samples)
    rows = fixed_rows(lengths)
    own, across = sum(map(pairs_of, lengths)), sum(pairs_of(sum(row)) for row in rows)
    print(f"\n{num_samples} samples of {min(lengths)} to {max(lengths)} tokens")
    print(f"pairs: {own:.3e} within samples; {across:.3e} in fixed rows without borders,"
          f" {across / own:.1f} times as many")  # fmt: skip
    print(f"{'ranks':>5}  {'micro batches':>13}  {'work, fixed rows':>16}  {'shared rows':>11}"
          f"  {'tokens sent, fixed':>18}  {'shared rows':>11}")  # fmt: skip
    for ranks in (4, 8, 16, 64):
        batch = balance(lengths, ranks, LONGEST // ranks * 2, work_of_layer)
        busiest = sum(max(work_of_zigzag(row, ranks)) for row in rows)
        sent = sum(
            sum(lengths[i] for i in row.samples) * (row.num_ranks - 1)
            for row in {row for microbatch in batch.microbatches for row in microbatch}
        )
        print(
            f"{ranks:>5}  {len(batch.microbatches):>13}"
            f"  {busiest * ranks / sum(map(work_of_layer, lengths)):>16.3f}"
            f"  {batch.imbalance:>11.4f}"
            f"  {sum(lengths) * (ranks - 1):>18.3e}  {sent:>11.3e}"
        )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: tuple[str, ...] = positional((), metavar="CASE", help=", ".join(CASES))


def main() -> int:
    """Print both tables; returns 1 if a case cannot be run."""
    wanted = read_command_line(Flags, description=__doc__.splitlines()[0]).cases
    failed = 0
    print(f"{'case':<28}{'loss':>10}{'gradient':>10}{'norm':>10}")
    for name, case in CASES.items():
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = errors_of(case, Path(folder))
            except Exception as error:
                failed = 1
                print(f"{name:<28}failed: {error}")
                continue
        print(f"{name:<28}{found.loss:>10.1e}{found.gradient:>10.1e}{found.grad_norm:>10.1e}",
              flush=True)  # fmt: skip
    print_balance()
    POOL.shutdown()
    return failed


if __name__ == "__main__":
    sys.exit(main())
