"""Peak memory of data parallelism on two ranks: torch's DDP and FSDP2, and our stages 0 to 3.

    python -m benchmarks.peak_memory                 # a plain PyTorch GPT of 34 million parameters

Each candidate trains a few steps (clipping and AdamW, fp32, one sequence of 256 tokens a rank) in
two fresh single-threaded gloo processes; candidates alternate. A row is the larger of the two
ranks' peak resident sizes (VmHWM), the median over the rounds, and its ratios to torch's wrappers.
The weights, gradients and moments of the model are 513 MiB, half of it 257 MiB; "imported" is a
process that has only imported torch and this benchmark.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.data_parallel import Workload, become_rank, step_of
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import no_flag
from tests.harness.machine import memory_bytes

CANDIDATES = (
    "imported", "torch DDP", "torch FSDP2", "stage 0", "stage 1", "stage 2", "stage 3",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Flags(Workload):
    """Flags of the command line."""

    optimizer: bool = no_flag(True)
    vocabulary: int = 16384
    microbatches: int = 1
    steps: int = 3
    """Number of steps of each process."""
    rounds: int = 3
    """Number of turns of each candidate."""


def train(rank: int, directory: str, name: str, options: Flags) -> None:
    """Train with one candidate and write the peak to a file; the main function of one process."""
    become_rank(rank, f"file://{directory}/store", name)
    if name != "imported":
        step = step_of(name, rank, options)
        for _ in range(options.steps):
            step()
    dist.barrier()
    Path(directory, f"peak{rank}").write_text(str(memory_bytes("VmHWM") / (1 << 20)))
    dist.destroy_process_group()


def measure(name: str, options: Flags) -> float:
    """Return the larger peak of the two ranks in MiB."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(train, args=(directory, name, options), nprocs=2)
        return max(float(path.read_text()) for path in Path(directory).glob("peak*"))


def main() -> None:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    peaks: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for _ in range(options.rounds):
        for name in CANDIDATES:
            peaks[name].append(measure(name, options))
    middle = {name: statistics.median(found) for name, found in peaks.items()}
    print(f"{'':<14}{'peak MiB':>10}{'of DDP':>9}{'of FSDP2':>10}   range")
    for name, found in peaks.items():
        print(
            f"{name:<14}{middle[name]:>10.0f}{middle[name] / middle['torch DDP']:>9.2f}"
            f"{middle[name] / middle['torch FSDP2']:>10.2f}   {min(found):.0f} ... {max(found):.0f}"
        )


if __name__ == "__main__":
    main()
