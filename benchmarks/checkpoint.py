"""Cost of saving and loading against raw files, safetensors, torch's format and megatron-core.

    python -m benchmarks.checkpoint [--million-parameters 64] [--ranks 1 2] [--repeats 5]
        [--directory DIR] [--megatron PYTHON] [--growth-saves 50]

Ranks hold rows of weights and of two Adam moments in fp32. All candidates take turns in the same
run; rows are medians, wall time of the slowest rank, processor time of all. Durable saves end when
the bytes are on the disk; files are removed and the disk is synced between turns. Loads read from
the page cache into memory that was used before, or into fresh memory (`load raw`), as the
candidate does by itself; `cold` rows read from the disk. Ours also hashes every byte, both ways.
Before a turn each rank touches as much memory as it will read or write and gives it back: on a
virtual machine the first use of a page costs several times the copy into it.

With `--megatron`, the Python of an environment with megatron-core, that takes its turns as well.

`pause` is what a training loop waits for an asynchronous save; the slowdown compares steps of
matrix products during the write with steps before it; memory is the process's resident size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_candidates import Candidates, Peer, busy_step, make_state

Times = dict[str, list[tuple[float, float]]]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def measure(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Run a collective function; return (wall seconds until all are done, own processor seconds,
    result)."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    result = function()
    processor = time.process_time() - processor
    dist.barrier()
    return time.perf_counter() - wall, processor, result


def resident_bytes() -> int:
    """Return the memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def take_turns(candidates: Candidates, peer: Peer | None, repeats: int) -> Times:
    """Let all candidates save and load `repeats` times."""
    rows: Times = {}

    def turn(row: str, function: Callable[[], Any]) -> Any:
        candidates.touch_memory()
        wall, processor, result = measure(function)
        everybody = torch.tensor([processor])
        dist.all_reduce(everybody)
        rows.setdefault(row, []).append((wall, float(everybody)))
        return result

    def turn_of_peer(row: str, what: str) -> None:
        if peer is not None:
            candidates.touch_memory()
            rows.setdefault(f"{row} megatron-core", []).append(peer.turn(what))

    names = ("raw", "safetensors", "torch", "ours")
    for _ in range(repeats):
        for name in names:
            candidates.remove(name)
            turn(f"save {name}", getattr(candidates, f"save_{name}"))
        turn_of_peer("save", "save")
        for name in ("raw", "raw_in_place", "safetensors", "torch", "ours"):
            turn(f"load {name}", getattr(candidates, f"load_{name}"))
        turn_of_peer("load", "load")
        for name in names:
            candidates.leave_cache(name)
            turn(f"load {name}, cold", getattr(candidates, f"load_{name}"))
        candidates.remove("ours")
        handle = turn("pause ours", candidates.begin_ours)
        turn("rest of ours", handle.finish)
        turn("save short-lived", candidates.save_short_lived)
        turn_of_peer("pause", "begin")
        turn_of_peer("rest of", "finish")
    return rows


def slowdown_of_steps(candidates: Candidates) -> float:
    """Return the median step during a background write over the median step without one."""
    step = busy_step(torch.randn(1024, 1024))

    def timed() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    before = [timed() for _ in range(50)]
    candidates.remove("ours")
    handle = candidates.begin_ours()
    during = []
    while not handle.is_written:
        during.append(timed())
    handle.finish()
    return statistics.median(during) / statistics.median(before)


def memory_of_saves(candidates: Candidates, num_saves: int) -> tuple[float, float]:
    """Return (extra memory during asynchronous saves, growth from the 5th to the last), both over
    the bytes of this rank."""
    base, sizes = resident_bytes(), []
    for _ in range(num_saves):
        candidates.remove("ours")
        handle = candidates.begin_ours()
        peak = resident_bytes()
        while not handle.is_written:
            peak = max(peak, resident_bytes())
            time.sleep(0.01)
        handle.finish()
        sizes.append(peak)
    settled = sizes[min(4, len(sizes) - 1)]
    return (max(sizes) - base) / candidates.num_bytes, (sizes[-1] - settled) / candidates.num_bytes


def show(rows: Times, num_bytes: int, repeats: int) -> None:
    """Print one table and the ratios that matter."""
    print(f"{num_bytes / 1e6:.0f} MB over all ranks, medians of {repeats} turns")
    print(f"{'':28}{'wall s':>9}{'cpu s':>9}{'GB/s wall':>11}")
    wall: dict[str, float] = {}
    processor: dict[str, float] = {}
    for name, times in rows.items():
        wall[name], processor[name] = (
            statistics.median(column) for column in zip(*times, strict=True)
        )
        rate = num_bytes / wall[name] / 1e9
        print(f"{name:28}{wall[name]:9.3f}{processor[name]:9.3f}{rate:11.2f}")
    names = ["torch", "ours"] + ["megatron-core"] * ("save megatron-core" in rows)
    for name in names:
        print(f"save {name} / safetensors: {wall[f'save {name}'] / wall['save safetensors']:.2f}")
    for name in ["safetensors", *names]:
        row = f"load {name}"
        print(
            f"{row} / raw: {wall[row] / wall['load raw']:.2f} wall, "
            f"{processor[row] / processor['load raw']:.2f} cpu"
        )
    for name in names[1:]:
        print(f"pause / durable save, {name}: {wall[f'pause {name}'] / wall[f'save {name}']:.2f}")


def bench(rank: int, size: int, arguments: argparse.Namespace, root: str, ports: list[int]) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    # Before anything else, while this process has no buffers yet.
    small = Candidates(make_state(max(13, arguments.million_parameters // 4), size), Path(root))
    extra, growth = memory_of_saves(small, arguments.growth_saves)
    candidates = Candidates(make_state(arguments.million_parameters, size), Path(root))
    peer = None
    if arguments.megatron:
        place = [str(n) for n in (arguments.million_parameters, rank, size, ports[1])]
        peer = Peer(arguments.megatron, candidates, place)
    rows = take_turns(candidates, peer, arguments.repeats)
    if peer is not None:
        peer.close()
    slowdown = slowdown_of_steps(candidates)
    if rank == 0:
        print(f"\n== {size} rank{'s' * (size > 1)}")
        show(rows, candidates.num_bytes * size, arguments.repeats)
        print(f"steps during the background write take {slowdown:.2f} of their time before")
        print(
            f"extra memory of asynchronous saves / local shard: {extra:.2f}; growth from save 5 "
            f"to {arguments.growth_saves}: {growth:+.3f}",
            flush=True,
        )
    dist.destroy_process_group()


def main() -> None:
    """Measure and print one table per number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--million-parameters", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to write; a temporary one")
    parser.add_argument("--megatron", default=None, help="Python of megatron-core's environment")
    parser.add_argument("--growth-saves", type=int, default=50)
    arguments = parser.parse_args()
    for size in arguments.ranks:
        root = tempfile.mkdtemp(dir=arguments.directory)
        try:
            ports = [free_port(), free_port()]
            torch.multiprocessing.spawn(bench, (size, arguments, root, ports), nprocs=size)
        finally:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
