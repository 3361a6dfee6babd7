"""What it costs two ranks of one machine to reduce and gather: in each other's memory, and by gloo.

    python -m benchmarks.exchange                    # 34 million elements of fp32

Two single-threaded processes exchange a buffer bucket by bucket, without any other work. The ways
alternate in one run; a row is the best of the rounds, in milliseconds of wall and of processor
time of a rank. "Kept" leaves mapped what was read of the other rank, as stage 0 does; the stages
that shard state give it back, and pay for the page faults.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron.core.distributed.communication import (
    Mesh,
    gather_parameters,
    reduce_gradients,
)
from megatron.core.settings.command_line import read_command_line
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport.shm.shared_buffer import SharedBuffer
from megatron.core.transport.shm.shm_bucket_transport import BucketSlot
from megatron.core.transport.work import Work, wait_all

Buckets = list[tuple[Tensor, BucketSlot | None]]


def reduce(buckets: Buckets, mesh: Mesh) -> None:
    """Average all buckets over the ranks."""
    wait_all(
        [
            Work(reduce_gradients(bucket, mesh, scale=0.5, tag=number, slot=place))
            for number, (bucket, place) in enumerate(buckets)
        ]
    )


def gather(buckets: Buckets, mesh: Mesh) -> None:
    """Collect the shards of all buckets."""
    gathers = [
        gather_parameters(bucket, mesh, tag=number, slot=place)
        for number, (bucket, place) in enumerate(buckets)
    ]
    wait_all(gathers)
    for _, place in buckets[:1]:
        if place is not None:
            place.memory.wait_for_readers()


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    elements: int = 34_000_000
    """Of the buffer."""
    bucket: int = 4_000_000
    """Elements of a bucket."""
    rounds: int = 5
    """Turns of each way."""


def measure(rank: int, store: str, options: Flags) -> None:
    """Let the ways alternate; the job of one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world, length = dist.group.WORLD, options.bucket
    count = max(1, options.elements // length)
    memory = SharedBuffer(4 * length * count, count)
    read = memory.tensor(torch.float32, 0, length * count).fill_(1.0).split(length)
    sent: Buckets = [(bucket, None) for bucket in torch.ones(length * count).split(length)]

    def places(*, keeps_pages: bool) -> Buckets:
        return [(b, BucketSlot(memory, i, keeps_pages)) for i, b in enumerate(read)]

    copies, shards = (
        Mesh(shard=SINGLE_RANK, replicate=world),
        Mesh(shard=world, replicate=SINGLE_RANK),
    )
    ways: dict[str, Callable[[], None]] = {
        "all-reduce, gloo": partial(reduce, sent, copies),
        "all-reduce, read and kept": partial(reduce, places(keeps_pages=True), copies),
        "all-reduce, read": partial(reduce, places(keeps_pages=False), copies),
        "reduce-scatter, messages": partial(reduce, sent, shards),
        "reduce-scatter, read": partial(reduce, places(keeps_pages=False), shards),
        "all-gather, messages": partial(gather, sent, shards),
        "all-gather, read": partial(gather, places(keeps_pages=False), shards),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            way()
            if turn > 0:
                now = time.perf_counter() - wall, time.process_time() - processor
                times[name].append(now)
    if rank == 0:
        print(f"{'':<28}{'wall ms':>9}{'cpu ms':>9}")
        for name, found in times.items():
            best_wall, best_processor = (min(column) * 1e3 for column in zip(*found, strict=True))
            print(f"{name:<28}{best_wall:>9.1f}{best_processor:>9.1f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(measure, args=(os.path.join(directory, "store"), options), nprocs=2)


if __name__ == "__main__":
    main()
