"""Cost of saving and loading: ours against raw files, safetensors and torch's distributed format.

    python -m benchmarks.checkpoint [--million-parameters 64] [--repeats 5] [--directory DIR]

One process holds weights and two Adam moments in fp32. All candidates take turns in the same run;
rows are medians. Durable saves end when the bytes are on the disk; files are removed and the disk
is synced between turns. Loads read from the page cache into memory that was used before ("in
place") or into fresh memory, as the candidate does by itself. Ours also hashes every byte, both
ways; the others notice nothing.

`pause` is what a training loop waits for an asynchronous save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.capabilities import require
from megatron.core.dist_checkpointing import ShardedTensor

HIDDEN = 1024


def make_state(million_parameters: int) -> dict[str, Tensor]:
    """Return weights of about so many parameters, and their moments."""
    num_layers = max(1, million_parameters * 10**6 // (12 * HIDDEN * HIDDEN))
    shapes = {
        "qkv": (3 * HIDDEN, HIDDEN),
        "proj": (HIDDEN, HIDDEN),
        "fc1": (4 * HIDDEN, HIDDEN),
        "fc2": (HIDDEN, 4 * HIDDEN),
        "norm": (HIDDEN,),
    }
    return {
        f"{kind}{layer}.{name}": torch.randn(shape)
        for kind in ("", "exp_avg.", "exp_avg_sq.")
        for layer in range(num_layers)
        for name, shape in shapes.items()
    }


class Candidates:
    """The ways to save and load one state in one directory."""

    def __init__(self, state: dict[str, Tensor], root: Path) -> None:
        self.state, self.root = state, root
        self.into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        self.num_bytes = sum(t.numel() * t.element_size() for t in state.values())
        self.safetensors = require("safetensors.torch", purpose="comparing with safetensors")

    def _declared(self, tensors: dict[str, Tensor]) -> dict[str, ShardedTensor]:
        return {key: ShardedTensor.from_rank_offsets(key, t) for key, t in tensors.items()}

    def save_raw(self) -> None:
        """Write the bytes one after another into one file."""
        with open(self.root / "raw", "wb", buffering=0) as file:
            for tensor in self.state.values():
                file.write(tensor.view(-1).numpy().data)
            os.fsync(file.fileno())

    def save_safetensors(self) -> None:
        """Use the library, and sync."""
        self.safetensors.save_file(self.state, self.root / "safetensors")
        with open(self.root / "safetensors", "rb") as file:
            os.fsync(file.fileno())

    def save_torch(self) -> None:
        """Use torch.distributed.checkpoint, which syncs its files."""
        dcp.save(self.state, checkpoint_id=self.root / "torch", no_dist=True)

    def save_ours(self) -> None:
        """Save durably, hashed and committed."""
        dist_checkpointing.save(self._declared(self.state), self.root / "ours")

    def pause_ours(self) -> Callable[[], None]:
        """Begin an asynchronous save, and return what finishes it."""
        handle = dist_checkpointing.save(
            self._declared(self.state), self.root / "ours", async_sharded_save=True
        )
        assert handle is not None
        return handle.finish

    def load_raw(self) -> None:
        """Read into fresh memory."""
        (self.root / "raw").read_bytes()

    def load_raw_in_place(self) -> None:
        """Read into memory that was used before."""
        with open(self.root / "raw", "rb", buffering=0) as file:
            for tensor in self.into.values():
                file.readinto(tensor.view(-1).numpy().data)

    def load_safetensors(self) -> None:
        """Map the file, and copy it as a model that keeps its parameters does."""
        loaded = self.safetensors.load_file(self.root / "safetensors")
        for key, tensor in self.into.items():
            tensor.copy_(loaded[key])

    def load_torch(self) -> None:
        """Load in place with torch.distributed.checkpoint."""
        dcp.load(self.into, checkpoint_id=self.root / "torch", no_dist=True)

    def load_ours(self) -> None:
        """Load in place, verified."""
        dist_checkpointing.load(self._declared(self.into), self.root / "ours")


def measure(function: Callable[[], object]) -> tuple[float, float, object]:
    """Return (wall seconds, processor seconds, result)."""
    wall, processor = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - wall, time.process_time() - processor, result


def remove(path: Path) -> None:
    """Delete what an earlier turn wrote, and let the disk come to rest."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.sync()


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million-parameters", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to write; a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    candidates = Candidates(make_state(arguments.million_parameters), root)
    rows: dict[str, list[tuple[float, float]]] = {}

    def turn(name: str, function: Callable[[], object]) -> object:
        wall, processor, result = measure(function)
        rows.setdefault(name, []).append((wall, processor))
        return result

    try:
        for _ in range(arguments.repeats):
            for name in ("raw", "safetensors", "torch", "ours"):
                remove(root / name)
                turn(f"save {name}", getattr(candidates, f"save_{name}"))
            for name in ("raw", "raw_in_place", "safetensors", "torch", "ours"):
                turn(f"load {name}", getattr(candidates, f"load_{name}"))
            remove(root / "ours")
            finish = turn("pause ours", candidates.pause_ours)
            turn("rest of asynchronous save", finish)  # type: ignore[arg-type]
    finally:
        shutil.rmtree(root)
    print(f"{candidates.num_bytes / 1e6:.0f} MB, medians of {arguments.repeats} turns")
    print(f"{'':28}{'wall s':>9}{'cpu s':>9}{'GB/s wall':>11}")
    for name, times in rows.items():
        wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:28}{wall:9.3f}{processor:9.3f}{candidates.num_bytes / wall / 1e9:11.2f}")


if __name__ == "__main__":
    main()
