"""Cost of saving and loading against raw files, safetensors, torch's format and megatron-core.

    python -m benchmarks.checkpoint [--only save load pause steps memory] [--ranks 1 2]
        [--million-parameters 64] [--turns 5] [--directory DIR] [--megatron PYTHON] [--saves 50]

Ranks hold rows of weights and of two Adam moments in fp32. Every candidate runs once per turn, in
another order in each turn, because the previous candidate affects memory and disk. Times are the
wall time of the slowest rank and the processor time of all ranks. A ratio is the median of the
turns' ratios, with the lowest and the highest: if a disk is slow for a while, it is slow for both
candidates. The ratio of the medians is printed as well.

save    until the bytes are on the disk. Before each save, earlier files are removed, the disk is
        synced, and as much memory as the save needs is touched and freed: on a virtual machine the
        first use of a page costs several times the copy into it.
load    from the page cache into memory that was used before, or into fresh memory (`raw`), as the
        candidate does by itself; then the same from the disk. Ours verifies every byte.
pause   blocking time of the training loop for an asynchronous save, against a durable save.
steps   matrix products during a background write, against the products before it; for comparison,
        the cost of a thread of the same priority that only writes and syncs the same bytes.
memory  memory that asynchronous saves add to the process, and its growth from save to save. Torch
        keeps a record of the last 2,000 collectives, about 2 MB. In a training this record is full
        before the first save, so the benchmark fills it first.

With `--megatron`, the Python of an environment with megatron-core, megatron-core also takes turns.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_candidates import (
    Candidates,
    Peer,
    Writing,
    busy_step,
    free_memory,
    make_state,
)
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from tests.harness.machine import free_port, memory_bytes

Way = Callable[[], Any]
FILES = ("raw", "safetensors", "torch", "ours")
PARTS = ("save", "load", "pause", "steps", "memory")


def spread(values: Sequence[float]) -> str:
    """Return the median and the range of values."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


class Contest:
    """Times of several candidates that alternate."""

    def __init__(self, candidates: Candidates, turns: int) -> None:
        self.candidates, self.turns = candidates, turns
        self.wall: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}

    def run(self, ways: dict[str, Way], prepare: Callable[[str], None]) -> None:
        """Run each candidate once per turn, in an order that differs from turn to turn.

        Args:
            ways: functions to time. If one returns a function, that function is called afterwards,
                untimed; if one returns a pair, it has timed itself (wall and processor seconds).
            prepare: called with the name before each run.
        """
        shuffler = random.Random(1)  # the same orders on all ranks
        for _ in range(self.turns):
            for name in shuffler.sample(list(ways), len(ways)):
                prepare(name)
                self._time(name, ways[name])

    def _time(self, name: str, way: Way) -> None:
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        answer = way()
        everybody = torch.tensor([time.process_time() - processor])
        dist.all_reduce(everybody)
        taken = time.perf_counter() - wall, float(everybody)
        if isinstance(answer, tuple):
            taken = answer
        elif answer is not None:
            answer()
        self.wall.setdefault(name, []).append(taken[0])
        self.processor.setdefault(name, []).append(taken[1])

    def show(self) -> None:
        """Print the times."""
        num_bytes = self.candidates.num_bytes * self.candidates.size
        print(f"{'':26}{'median s':>9}{'lowest':>9}{'highest':>9}{'cpu s':>9}{'GB/s':>8}")
        for name, wall in self.wall.items():
            middle, cpu = statistics.median(wall), statistics.median(self.processor[name])
            rate = num_bytes / middle / 1e9
            print(f"{name:26}{middle:9.3f}{min(wall):9.3f}{max(wall):9.3f}{cpu:9.3f}{rate:8.2f}")

    def compare(self, name: str, other: str) -> None:
        """Print the ratio of two candidates."""
        said = []
        for kind, times in (("wall", self.wall), ("cpu", self.processor)):
            pairs = zip(times[name], times[other], strict=True)
            ratios = [a / b for a, b in pairs if b > 0]
            medians = statistics.median(times[name]) / statistics.median(times[other])
            said.append(f"{kind} {spread(ratios)}, of medians {medians:.2f}")
        print(f"{name} / {other}: {'; '.join(said)}")


def time_saves(candidates: Candidates, peer: Peer | None, turns: int) -> None:
    """Compare durable saves."""
    contest = Contest(candidates, turns)
    ways: dict[str, Way] = {name: getattr(candidates, f"save_{name}") for name in FILES}
    if peer is not None:
        ways["megatron-core"] = lambda: peer.turn("save")
    contest.run(ways, lambda _: candidates.begin_clean())
    if candidates.rank == 0:
        contest.show()
        for name in list(ways)[2:]:
            contest.compare(name, "safetensors")


def time_loads(candidates: Candidates, peer: Peer | None, turns: int) -> None:
    """Compare loads from the page cache and from the disk."""
    candidates.begin_clean()
    for name in FILES:
        getattr(candidates, f"save_{name}")()
    ways: dict[str, Way] = {
        name: getattr(candidates, f"load_{name.replace(' ', '_')}")
        for name in ("raw", "raw in place", *FILES[1:])
    }
    if peer is not None:
        peer.turn("save")
        ways["megatron-core"] = lambda: peer.turn("load")
    warm = Contest(candidates, turns)
    warm.run(ways, lambda _: free_memory(candidates.num_bytes))
    cold = Contest(candidates, turns)
    cold.run({name: ways[name] for name in FILES}, candidates.leave_cache)
    if candidates.rank == 0:
        warm.show()
        for name in list(ways)[2:]:
            warm.compare(name, "raw")
        print("from the disk")
        cold.show()


def time_pauses(candidates: Candidates, peer: Peer | None, turns: int) -> None:
    """Compare the blocking time of training with a durable save."""
    contest = Contest(candidates, turns)
    ways: dict[str, Way] = {
        "durable": candidates.save_ours,
        "pause": lambda: candidates.begin_ours().finish,
        "non-persistent": candidates.save_non_persistent,
    }
    if peer is not None:
        ways["durable megatron-core"] = lambda: peer.turn("save")
        ways["pause megatron-core"] = lambda: peer.turn("begin")

    def prepare(name: str) -> None:
        if peer is not None and peer.is_saving:
            peer.turn("finish")
        candidates.begin_clean()

    candidates.begin_ours().finish()  # allocates the buffer, once in a run
    contest.run(ways, prepare)
    if candidates.rank == 0:
        contest.show()
        contest.compare("pause", "durable")
        if peer is not None:
            contest.compare("pause megatron-core", "durable megatron-core")
    if peer is not None and peer.is_saving:
        peer.turn("finish")


def time_steps(candidates: Candidates, turns: int) -> None:
    """Compare steps during background writes with steps before them."""
    step = busy_step(torch.randn(1024, 1024))

    def timed() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    begins: dict[str, Callable[[], Writing]] = {
        "only writing": candidates.begin_raw,
        "ours": candidates.begin_ours,
    }
    found: dict[str, list[list[float]]] = {name: [[], [], [], []] for name in begins}
    for turn in range(turns):
        for name in list(begins) if turn % 2 else list(begins)[::-1]:
            candidates.begin_clean()
            before = [timed() for _ in range(30)]
            dist.barrier()
            start, processor = time.perf_counter(), time.process_time()
            writing, during = begins[name](), []
            while not writing.is_written:
                during.append(timed())
            written = time.perf_counter() - start
            undisturbed = len(during) * statistics.mean(before)
            own = time.process_time() - processor - undisturbed
            lost = sum(during) - undisturbed
            writing.finish()
            median = statistics.median(during) / statistics.median(before)
            values = (median, lost, written, own)
            for column, value in zip(found[name], values, strict=True):
                column.append(value)
    if candidates.rank == 0:
        for name, (medians, lost, written, own) in found.items():
            print(
                f"{name:12} a step takes {spread(medians)} of its time before; rank 0 writes for "
                f"{spread(written)} s, in which training loses {spread(lost)} s; processor time "
                f"in addition to the steps {spread(own)} s"
            )


def watch_memory(candidates: Candidates, num_saves: int) -> None:
    """Print the memory that asynchronous saves add to each rank, relative to the rank's bytes."""
    for _ in range(700):  # three collectives each, or more
        dist.all_gather_object([None] * candidates.size, None)
    candidates.begin_clean()
    base, sizes = memory_bytes("VmRSS"), []
    for _ in range(num_saves):
        candidates.begin_clean()
        handle = candidates.begin_ours()
        peak = memory_bytes("VmRSS")
        while not handle.is_written:
            peak = max(peak, memory_bytes("VmRSS"))
            time.sleep(0.01)
        handle.finish()
        sizes.append(peak)
    places = sorted({min(n, num_saves) - 1 for n in (5, 20, 50, 100, num_saves)})
    shares = [[(sizes[place] - base) / candidates.num_bytes for place in places]]
    everybody: list[Any] = [None] * candidates.size
    dist.all_gather_object(everybody, (shares[0], sizes[-1] - sizes[places[0]]))
    if candidates.rank == 0:
        for rank, (found, growth) in enumerate(everybody):
            text = ", ".join(f"{s:.3f} at save {p + 1}" for s, p in zip(found, places, strict=True))
            print(
                f"rank {rank}: extra memory / its {candidates.num_bytes / 1e6:.0f} MB: {text}; "
                f"{growth / 1e6:+.1f} MB from save {places[0] + 1} on"
            )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    only: tuple[str, ...] = flag(tuple(PARTS), choices=PARTS)
    """Measurements to run."""
    million_parameters: int = 64
    ranks: tuple[int, ...] = (1, 2)
    turns: int = 5
    directory: str | None = None
    """Directory to write to; by default a temporary one."""
    megatron: str | None = None
    """Python of megatron-core's environment."""
    saves: int = 50
    """Number of saves of the memory measurement."""


def bench(rank: int, size: int, arguments: Flags, root: str, ports: list[int]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group("gloo", rank=rank, world_size=size)

    def show_title(title: str) -> None:
        if rank == 0:
            print(f"\n== {size} rank{'s' * (size > 1)}: {title}", flush=True)

    if "memory" in arguments.only:  # before anything else, while this process has no buffers yet
        show_title("memory")
        share = max(13, arguments.million_parameters // 4)
        watch_memory(Candidates(make_state(share, size), Path(root)), arguments.saves)
    candidates = Candidates(make_state(arguments.million_parameters, size), Path(root))
    peer = None
    if arguments.megatron:
        place = [str(n) for n in (arguments.million_parameters, rank, size, ports[1])]
        peer = Peer(arguments.megatron, candidates, place)
    megabytes = f"{candidates.num_bytes * size / 1e6:.0f} MB, {arguments.turns} turns"
    parts: dict[str, Callable[[], None]] = {
        "save": lambda: time_saves(candidates, peer, arguments.turns),
        "load": lambda: time_loads(candidates, peer, arguments.turns),
        "pause": lambda: time_pauses(candidates, peer, arguments.turns),
        "steps": lambda: time_steps(candidates, arguments.turns),
    }
    for name, part in parts.items():
        if name in arguments.only:
            show_title(f"{name}, {megabytes}")
            part()
    candidates.begin_clean()
    if peer is not None:
        peer.close()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print one table per number of ranks."""
    arguments = read_command_line(Flags, description=__doc__)
    for size in arguments.ranks:
        root = tempfile.mkdtemp(dir=arguments.directory)
        try:
            ports = [free_port(), free_port()]
            torch.multiprocessing.spawn(bench, (size, arguments, root, ports), nprocs=size)
        finally:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
