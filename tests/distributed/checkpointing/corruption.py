"""Damage of every kind: python -m tests.distributed.checkpointing.corruption [--flips 10000]

Damages a checkpoint, loads it, restores it; beside it the same for torch's distributed checkpoint
format. Flips random bits of all files and a bit of every byte of the metadata files; cuts,
lengthens, empties and removes files; swaps shards of one size; puts files of another iteration and
of another run, of the same sizes, in place. Exits 1 if one damaged checkpoint of ours is accepted
or one file is not named.
"""

import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.settings.command_line import read_command_line
from tests.unit.dist_checkpointing.ranks import must_succeed, run_ranks

Change = tuple[str, Callable[[], None]]
"""The file that is damaged, and how."""
METADATA = ("manifest.json", "metadata.json", "common.json", ".metadata")


def tensors(seed: int) -> dict[str, Tensor]:
    """Return the state: matrices in two dtypes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer{i}": torch.randn(48, 32, generator=generator).to(dtype)
        for i, dtype in enumerate((torch.float32, torch.bfloat16) * 2)
    }


class Ours:
    """This project's format, saved by four ranks."""

    name = "ours"

    def __init__(self, directory: Path, seed: int, step: int) -> None:
        self.directory, self.state, self.step = directory / f"iter_{step:07d}", tensors(seed), step

        def save(peers) -> None:
            shards = {
                key: ShardedTensor.from_rank_offsets(
                    key, tensor.chunk(4)[peers.rank].clone(), (0, peers.rank, 4)
                )
                for key, tensor in self.state.items()
            }
            state = shards | {"step": step, "lr": 0.1}
            dist_checkpointing.save(state, self.directory, process_group=peers)

        must_succeed(run_ranks(4, save))

    def load(self) -> bool:
        """Load; return whether all values are those that were saved."""
        into = {k: torch.zeros_like(t) for k, t in self.state.items()}
        template = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in into.items()}
        found = dist_checkpointing.load(template, self.directory)
        return found["step"] == self.step and all(torch.equal(into[k], self.state[k]) for k in into)


class Theirs:
    """torch.distributed.checkpoint, a file per tensor, so that there are shards of one size."""

    name = "torch DCP"

    def __init__(self, directory: Path, seed: int, step: int) -> None:
        self.directory, self.state, self.step = directory / f"torch{step}", tensors(seed), step
        writer = dcp.FileSystemWriter(self.directory, single_file_per_rank=False)
        dcp.save(self.state | {"step": step}, storage_writer=writer, no_dist=True)

    def load(self) -> bool:
        """See `Ours.load`."""
        into: dict = {k: torch.zeros_like(t) for k, t in self.state.items()} | {"step": 0}
        dcp.load(into, checkpoint_id=self.directory, no_dist=True)
        return into["step"] == self.step and all(
            torch.equal(into[k], self.state[k]) for k in self.state
        )


def flip(path: Path, position: int, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def random_flips(directory: Path, rng: random.Random, count: int) -> Iterator[Change]:
    """Flip one random bit, in all files in turn."""
    files = sorted(directory.iterdir())
    for number in range(count):
        path = files[number % len(files)]
        yield path.name, lambda p=path: flip(p, rng.randrange(p.stat().st_size), rng.randrange(8))


def metadata_flips(directory: Path, rng: random.Random, most: int) -> Iterator[Change]:
    """Flip a bit of every byte of the metadata files (of `most` of them, spread evenly)."""
    for path in sorted(p for p in directory.iterdir() if p.name in METADATA):
        size = path.stat().st_size
        for position in range(0, size, max(1, size // most)):
            yield path.name, lambda p=path, at=position: flip(p, at, rng.randrange(8))


def sizes_changed(directory: Path) -> Iterator[Change]:
    """Empty, halve, cut, lengthen and remove each file."""
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        for changed in (b"", data[: len(data) // 2], data[:-1], data + b"\0"):
            yield path.name, lambda p=path, d=changed: p.write_bytes(d)
        yield path.name, path.unlink


def swaps(directory: Path) -> Iterator[Change]:
    """Exchange every two data files of one size."""
    files = sorted(p for p in directory.iterdir() if p.name.startswith("__"))
    for one in files:
        for other in files:
            if one < other and one.stat().st_size == other.stat().st_size:

                def swap(one: Path = one, other: Path = other) -> None:
                    first, second = one.read_bytes(), other.read_bytes()
                    one.write_bytes(second)
                    other.write_bytes(first)

                yield one.name, swap


def transplants(directory: Path, donor: Path) -> Iterator[Change]:
    """Put each data file of another checkpoint, of the same size, in place."""
    for path in sorted(directory.iterdir()):
        same = donor / path.name
        if path.name.startswith("__") and same.stat().st_size == path.stat().st_size:
            yield path.name, lambda p=path, s=same: shutil.copyfile(s, p) and None


def outcomes(checkpoint: Ours | Theirs, changes: Iterator[Change]) -> Counter[str]:
    """Load after each change and count; the directory is restored."""
    found = Counter[str]()
    kept = {path: path.read_bytes() for path in checkpoint.directory.iterdir()}
    for name, change in changes:
        before = {path: path.read_bytes() for path in kept}
        change()
        try:
            found["accepted, values right" if checkpoint.load() else "accepted, WRONG"] += 1
        except DamagedCheckpointError as error:
            # A flip in metadata.json may point at the manifest, which then no longer matches it.
            is_named = name in str(error) or name == "metadata.json"
            found["refused, file named" if is_named else "refused"] += 1
        except (Exception, CheckpointException):  # torch's is no Exception
            found["refused"] += 1
        for path, data in before.items():
            path.write_bytes(data)
    assert checkpoint.load(), "the undamaged checkpoint loads"
    return found


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    flips: int = 10000
    torch_flips: int = 300


def main() -> int:
    """Damage both formats and print what happened."""
    arguments = read_command_line(Flags, description=__doc__)
    warnings.simplefilter("ignore")
    logging.disable()
    is_bad = False
    columns = ("refused, file named", "refused", "accepted, values right", "accepted, WRONG")
    print(f"{'':34}{'':10}{'damaged':>9}" + "".join(f"{c:>24}" for c in columns))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for make in (Ours, Theirs):
            checkpoint = make(root, 0, 10)
            elsewhere, later = make(root / "other", 1, 10), make(root, 2, 20)
            is_ours = make is Ours
            flips = arguments.flips if is_ours else arguments.torch_flips
            rng, where = random.Random(1), checkpoint.directory
            rows: dict[str, Iterator[Change]] = {
                "random bit flips": random_flips(where, rng, flips),
                "every byte of the metadata": metadata_flips(
                    where, rng, 1 << 30 if is_ours else flips
                ),
                "emptied, cut, lengthened, removed": sizes_changed(where),
                "shards swapped": swaps(where),
                "shards of another run": transplants(where, elsewhere.directory),
                "shards of another iteration": transplants(where, later.directory),
            }
            for row, changes in rows.items():
                found = outcomes(checkpoint, changes)
                shown = "".join(f"{found[c]:>24}" for c in columns)
                print(f"{row:34}{checkpoint.name:10}{sum(found.values()):>9}{shown}", flush=True)
                is_bad |= is_ours and set(found) != {"refused, file named"}
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
