"""Ways to save and load the state of one rank, for `benchmarks.checkpoint`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import AsyncSave, ShardedTensor
from megatron.core.dist_checkpointing.async_save import lower_priority
from megatron.core.foundation.optional_imports import require
from megatron.core.transport.object_collectives import SingleProcess
from megatron.training.checkpointing.restore import as_local_state

HIDDEN = 1024


def make_state(million_parameters: int, num_ranks: int) -> dict[str, Tensor]:
    """Return this rank's rows of about this many parameters and of their two Adam moments, fp32."""
    num_layers = max(1, million_parameters * 10**6 // (12 * HIDDEN * HIDDEN))
    rows = {"qkv": 3 * HIDDEN, "proj": HIDDEN, "fc1": 4 * HIDDEN, "fc2": 4 * HIDDEN}
    return {
        f"{kind}{layer}.{name}": torch.randn(count // num_ranks, HIDDEN)
        for kind in ("", "exp_avg.", "exp_avg_sq.")
        for layer in range(num_layers)
        for name, count in rows.items()
    }


def free_memory(num_bytes: int) -> None:
    """Touch and free memory, so that the next candidate finds free pages."""
    torch.empty(num_bytes, dtype=torch.uint8).fill_(1)


class Writing(Protocol):
    """A write in the background."""

    @property
    def is_written(self) -> bool:
        """Return whether this rank's bytes are on the disk."""
        ...

    def finish(self) -> None:
        """Wait for it: collective."""
        ...


class Candidates:
    """The ways to save and load one rank's state in one directory; methods are collective."""

    def __init__(self, state: dict[str, Tensor], root: Path) -> None:
        self.state, self.root = state, root
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        self.num_bytes = sum(t.numel() * t.element_size() for t in state.values())
        self.safetensors = require("safetensors.torch", purpose="comparing with safetensors")
        self.mesh = init_device_mesh("cpu", (self.size,))

    def path(self, name: str) -> Path:
        """Return a candidate's path; raw and safetensors write one file per rank."""
        return self.root / (f"{name}{self.rank}" if name in ("raw", "safetensors") else name)

    def begin_clean(self) -> None:
        """Delete all written files, wait until the disk is idle, and free memory."""
        dist.barrier()
        if self.rank == 0:
            for path in self.root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        free_memory(self.num_bytes)
        dist.barrier()

    def leave_cache(self, name: str) -> None:
        """Drop the page cache, so that the next load reads the disk."""
        path = self.path(name)
        for file in path.iterdir() if path.is_dir() else [path]:
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()

    # raw ------------------------------------------------------------------------------------

    def save_raw(self) -> None:
        """Write the bytes one after another, and sync."""
        with open(self.path("raw"), "wb", buffering=0) as file:
            for tensor in self.state.values():
                file.write(tensor.view(-1).numpy().data)
            os.fsync(file.fileno())

    def begin_raw(self) -> Writing:
        """Write the bytes in a thread with the low priority of our writer."""
        return RawWriting(self)

    def load_raw(self) -> None:
        """Read into fresh memory."""
        self.path("raw").read_bytes()

    def load_raw_in_place(self) -> None:
        """Read into memory that was used before."""
        with open(self.path("raw"), "rb", buffering=0) as file:
            for tensor in self.into.values():
                file.readinto(tensor.view(-1).numpy().data)

    # safetensors ----------------------------------------------------------------------------

    def save_safetensors(self) -> None:
        """Use the library, and sync."""
        self.safetensors.save_file(self.state, self.path("safetensors"))
        with open(self.path("safetensors"), "rb") as file:
            os.fsync(file.fileno())

    def load_safetensors(self) -> None:
        """Map the file, and copy it into existing parameters."""
        loaded = self.safetensors.load_file(self.path("safetensors"))
        for key, tensor in self.into.items():
            tensor.copy_(loaded[key])

    # torch ----------------------------------------------------------------------------------

    def _distributed(self, tensors: dict[str, Tensor]) -> dict[str, DTensor]:
        return {
            key: DTensor.from_local(tensor, self.mesh, [Shard(0)], run_check=False)
            for key, tensor in tensors.items()
        }

    def save_torch(self) -> None:
        """Use torch.distributed.checkpoint, which syncs its files."""
        dcp.save(self._distributed(self.state), checkpoint_id=self.path("torch"))

    def load_torch(self) -> None:
        """Load in place with torch.distributed.checkpoint."""
        dcp.load(self._distributed(self.into), checkpoint_id=self.path("torch"))

    # ours -----------------------------------------------------------------------------------

    def declared(self, tensors: dict[str, Tensor]) -> dict[str, ShardedTensor]:
        """Declare the rows of this rank."""
        place = (0, self.rank, self.size)
        return {key: ShardedTensor.from_rank_offsets(key, t, place) for key, t in tensors.items()}

    def save_ours(self) -> None:
        """Save durably, hashed and committed."""
        dist_checkpointing.save(self.declared(self.state), self.path("ours"))

    def begin_ours(self) -> AsyncSave:
        """Begin an asynchronous save."""
        handle = dist_checkpointing.save(
            self.declared(self.state), self.path("ours"), async_sharded_save=True
        )
        assert handle is not None
        return handle

    def save_non_persistent(self) -> None:
        """Save this rank's share to a memory disk, as a non-persistent checkpoint."""
        name = f"non_persistent{self.rank}"
        own = as_local_state(self.declared(self.state))
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            dist_checkpointing.save(own, Path(directory) / name, process_group=SingleProcess())

    def load_ours(self) -> None:
        """Load in place, verified."""
        dist_checkpointing.load(self.declared(self.into), self.path("ours"))


class RawWriting:
    """A thread that writes a rank's bytes from the memory that training uses, and syncs."""

    def __init__(self, candidates: Candidates) -> None:
        def write() -> None:
            lower_priority()
            candidates.save_raw()

        self._thread = threading.Thread(target=write)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()
        dist.barrier()


class Peer:
    """megatron-core in another environment: the same sizes, driven through a pipe.

    One process per rank runs `checkpoint_peer.py` with that environment's Python.
    """

    def __init__(self, python: str, candidates: Candidates, arguments: list[str]) -> None:
        script = Path(__file__).parent / "checkpoint_peer.py"
        self.process = subprocess.Popen(
            [python, str(script), str(candidates.path("megatron")), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.is_saving = False
        self._answer()

    def _answer(self) -> tuple[float, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("peer: "):
                wall, processor = map(float, line.split()[1:])
                everybody = torch.tensor([processor])
                dist.all_reduce(everybody)
                return wall, float(everybody)
        raise RuntimeError(f"the peer ended with status {self.process.wait()}")

    def turn(self, what: str) -> tuple[float, float]:
        """Send a command (save, load, begin, finish); return (wall, processor seconds of all)."""
        assert self.process.stdin is not None
        self.is_saving = what == "begin"
        self.process.stdin.write(what + "\n")
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def busy_step(weight: Tensor) -> Callable[[], None]:
    """Return a step of a training loop: matrix products of one thread."""
    activations = torch.randn(256, HIDDEN)

    def step() -> None:
        for _ in range(4):
            torch.mm(activations, weight)

    return step
