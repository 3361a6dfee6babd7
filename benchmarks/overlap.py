"""Time that overlap saves on a slow link: two ranks in separate network namespaces.

    sudo python -m benchmarks.overlap --mbit 2000 --trace overlap.json

Needs Linux, root, and the programs `ip` and `tc` (iproute2). A pair of virtual network devices
joins the two ranks; a token bucket (tc-tbf(8)) limits each device to `--mbit`. Both ranks train the
plain PyTorch GPT of `benchmarks.data_parallel` (one sequence of 256 tokens, clipping, AdamW).
Candidates alternate in rounds of three steps; the last two steps are measured. A row is the median
of the rounds, per step. During a step, the number of sent bytes is read every 2 ms: the columns
show the bytes of each phase. The trace (chrome://tracing, ui.perfetto.dev) shows phases and link of
the last turn of each candidate.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.data_parallel import Workload, our_step
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag, no_flag

CANDIDATES: dict[str, dict[str, object]] = {
    "stage 0": {},
    "stage 0, reduction overlapped": {"overlap_grad_reduce": True},
    "stage 1": {"use_distributed_optimizer": True},
    "stage 1, reduction overlapped": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
    },
    "stage 1, both overlapped": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "stage 3": {"data_parallel_sharding_strategy": "optim_grads_params"},
}
PHASES = ("forward", "backward", "finish", "update")
SAMPLE_SECONDS = 0.002
STEPS_IN_A_ROW = 2
WIDTH = max(map(len, CANDIDATES)) + 2


@dataclass
class Timeline:
    """Begin times of the phases of some steps, and the number of sent bytes over time."""

    phases: list[tuple[str, float, float]] = field(default_factory=list)
    """(name, begin, end) in seconds."""
    sent: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, number of bytes that the device has sent)."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the begin and the end of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases.append((name, begin, time.perf_counter()))

    @property
    def seconds(self) -> float:
        """Duration of a step."""
        return (self.phases[-1][2] - self.phases[0][1]) / STEPS_IN_A_ROW

    def duration(self, name: str) -> float:
        """Seconds of a step's phases with this name."""
        seconds = sum(end - begin for phase, begin, end in self.phases if phase == name)
        return seconds / STEPS_IN_A_ROW

    @property
    def num_bytes(self) -> float:
        """Bytes sent in a step."""
        return (self.sent[-1][1] - self.sent[0][1]) / STEPS_IN_A_ROW

    def bytes_in(self, name: str) -> float:
        """Return the bytes sent during a step's phases with this name."""
        return (
            sum(self._at(e) - self._at(b) for phase, b, e in self.phases if phase == name)
            / STEPS_IN_A_ROW
        )

    def _at(self, moment: float) -> int:
        return next((count for when, count in self.sent if when >= moment), self.sent[-1][1])


class Link:
    """A thread that repeatedly reads the number of bytes that a network device has sent."""

    def __init__(self, device: str) -> None:
        self._path = Path(f"/sys/class/net/{device}/statistics/tx_bytes")

    @contextmanager
    def watched(self, timeline: Timeline) -> Iterator[None]:
        """Fill `timeline.sent` while the block runs."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(SAMPLE_SECONDS):
                timeline.sent.append((time.perf_counter(), int(self._path.read_text())))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            timeline.sent.append((time.perf_counter(), int(self._path.read_text())))


@dataclass(frozen=True, kw_only=True)
class Flags(Workload):
    """Flags of the command line."""

    mbit: int = 2000
    """Speed of the link in Mbit/s."""
    optimizer: bool = no_flag(True)
    vocabulary: int = 4096
    microbatches: int = no_flag(1)
    rounds: int = 3
    """Number of turns of each candidate."""
    trace: str | None = None
    """File for a chrome trace of the last step of each candidate."""
    rank: int | None = flag(None, is_hidden=True)
    directory: str | None = flag(None, is_hidden=True)


def train(rank: int, options: Flags) -> list[dict[str, object]]:
    """Alternate the candidates in one process; return the events of the trace."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{options.directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    link = Link(os.environ["GLOO_SOCKET_IFNAME"])
    current = Timeline()
    steps = {
        name: our_step(rank, settings, options, lambda phase: current.phase(phase))
        for name, settings in CANDIDATES.items()
    }
    for step in steps.values():
        step()
    found: dict[str, list[Timeline]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            dist.barrier()
            current = Timeline()
            step()  # its parameters may be gathered during the next step
            current = Timeline()
            with link.watched(current):
                for _ in range(STEPS_IN_A_ROW):
                    step()
            found[name].append(current)
    if rank == 0:
        print_rows(found)
    dist.barrier()
    dist.destroy_process_group()
    return [e for i, (name, t) in enumerate(found.items()) for e in events(i, name, t[-1])]


def print_rows(found: dict[str, list[Timeline]]) -> None:
    """Print the medians of each candidate."""
    columns = "".join(f"{phase:>18}" for phase in PHASES)
    print(f"{'':<{WIDTH}}{'step ms':>8}{'MB':>6}{columns}   (ms, share of the bytes)")
    for name, lines in found.items():
        total = statistics.median(line.num_bytes for line in lines)
        cells = ""
        for phase in PHASES:
            seconds = statistics.median(line.duration(phase) for line in lines)
            share = statistics.median(line.bytes_in(phase) for line in lines) / total
            cells += f"{seconds * 1e3:>11.0f}{share:>7.0%}"
        seconds = statistics.median(line.seconds for line in lines)
        print(f"{name:<{WIDTH}}{seconds * 1e3:>8.0f}{total / 1e6:>6.0f}{cells}", flush=True)


def events(number: int, name: str, line: Timeline) -> list[dict[str, object]]:
    """Return the trace events of a step: its phases, and the link's speed."""
    zero = line.phases[0][1]
    process = {"pid": number, "tid": 0}
    found: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", **process, "args": {"name": name}}
    ]
    for phase, begin, end in line.phases:
        span = {"ts": (begin - zero) * 1e6, "dur": (end - begin) * 1e6}
        found.append({"ph": "X", "name": phase, **process, **span})
    for (before, first), (now, second) in zip(line.sent, line.sent[1:], strict=False):
        speed = (second - first) / (now - before) / 1e6
        at = {"ts": (before - zero) * 1e6, "args": {"MB/s": speed}}
        found.append({"ph": "C", "name": "sent", **process, **at})
    return found


# The link -------------------------------------------------------------------------------------


def problem() -> str | None:
    """Return why this machine cannot run the benchmark; None if it can."""
    if sys.platform != "linux":
        return "network namespaces are a part of Linux; this is " + sys.platform
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"not found: {', '.join(missing)}; install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root; run it with sudo"
    tried = subprocess.run(["ip", "netns", "add", name_of(0)], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    return None


def name_of(rank: int) -> str:
    """Return the namespace and the network device of a rank."""
    return f"lat{os.getpid() % 100000}r{rank}"


@contextmanager
def shaped_link(mbit: int) -> Iterator[None]:
    """Join the namespaces of both ranks; the first one exists already."""

    def call(*words: str) -> None:
        subprocess.run(words, check=True)

    first, second = name_of(0), name_of(1)
    try:
        call("ip", "netns", "add", second)
        call("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for rank, name in enumerate((first, second)):
            call("ip", "link", "set", name, "netns", name)
            inside = ("ip", "-n", name)
            call(*inside, "addr", "add", f"10.213.47.{rank + 1}/24", "dev", name)
            call(*inside, "link", "set", name, "up")
            call(*inside, "link", "set", "lo", "up")
            bucket = ("rate", f"{mbit}mbit", "burst", "512kb", "latency", "50ms")
            call("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *bucket)
        yield
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run_ranks(words: list[str]) -> int:
    """Run both ranks in their namespaces; return the first exit status that is not 0."""
    ranks = []
    for rank in range(2):
        name = name_of(rank)
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": name,
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.overlap"]
        ranks.append(subprocess.Popen([*command, "--rank", str(rank), *words], env=environment))
    try:
        return next((status for status in [rank.wait() for rank in ranks] if status), 0)
    finally:
        for rank in ranks:
            rank.kill()


def main() -> int:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    if options.rank is not None:
        found = train(options.rank, options)
        if options.rank == 0 and options.trace:
            Path(options.trace).write_text(json.dumps({"traceEvents": found}))
        return 0
    if reason := problem():
        print(f"cannot shape a link: {reason}", file=sys.stderr)
        return 2
    # Exit by an exception, so that cleanup runs if the command is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"two ranks, {options.mbit} Mbit/s each way")
    with tempfile.TemporaryDirectory() as directory, shaped_link(options.mbit):
        return run_ranks([*sys.argv[1:], "--directory", directory])


if __name__ == "__main__":
    sys.exit(main())
