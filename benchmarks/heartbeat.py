"""Cost of the heartbeat and its watchdog in a training step.

    python -m benchmarks.heartbeat                  # TP 2, PP 2, ZeRO-1 on two ranks
    python -m benchmarks.heartbeat --pairs 5 tp2

Two measurements of the same figure:

    counted      nanoseconds of each kind of note, timed alone, times the number of these notes per
                 step, over the processor seconds of a step
    alternating  the same job under torchrun with the watchdog and with
                 --ft-rank-heartbeat-timeout 0 in turns: processor seconds of the ranks per step,
                 and of the watchdog

The model is small (hidden size 256, 4 layers, 128 tokens): the steps of a larger model are longer
and have the same number of notes.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.foundation.flight_recorder import PROGRESS, Field, recorded
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional

FIRST, LAST = 10, 50
"""Steps at the begin and the end of the measurement."""
REPORT = "HEARTBEAT_REPORT"
"""Environment variable with the file for a rank's measurements."""
COUNTS = "HEARTBEAT_COUNTS"
"""Environment variable that enables counting of notes, which takes longer than the notes."""
WATCHDOG = b"megatron.resilience.watchdog"
MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --vocab-size 1000"
    " --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 4 --mock-data"
    " --tokenizer-type NullTokenizer --lr 1e-3 --log-interval 10 --distributed-backend gloo"
    f" --eval-iters 0 --num-workers 0 --train-iters {LAST}"
)
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "zero1": "--use-distributed-optimizer",
}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    layouts: tuple[str, ...] = positional((), metavar="LAYOUT", help=", ".join(LAYOUTS))
    pairs: int = 3
    """Number of jobs with and without the watchdog."""


# In a rank ---------------------------------------------------------------------------------------


class Meter:
    """Measures this process between two steps."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._began: tuple[float, float, Counter[str]] | None = None

    def after_step(self, step: int) -> None:
        """Record the times; after the last step, write the report."""
        now = time.perf_counter(), time.process_time(), self.calls.copy()
        if step == FIRST:
            self._began = now
        if step == LAST and self._began is not None:
            began, steps = self._began, LAST - FIRST
            calls = {name: (n - began[2][name]) / steps for name, n in self.calls.items()}
            found = {
                "step_s": (now[0] - began[0]) / steps,
                "processor_s": (now[1] - began[1]) / steps,
                "calls": calls,
            }
            Path(os.environ[REPORT], os.environ["RANK"]).write_text(json.dumps(found))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its calls counted."""

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call


def run_rank() -> None:
    """Train with the flags of the command line, and measure."""
    meter, note = Meter(), PROGRESS.set_field

    def note_and_measure(word: Field, value: int) -> None:
        note(word, value)
        if word == Field.NUM_STEPS:
            meter.after_step(value)

    if COUNTS in os.environ:
        for name in NOTES:
            setattr(PROGRESS, name, meter.counted(name, getattr(PROGRESS, name)))
        note = PROGRESS.set_field
    PROGRESS.set_field = note_and_measure  # type: ignore[method-assign]
    runpy.run_path("pretrain_gpt.py", run_name="__main__")


# Notes alone -------------------------------------------------------------------------------------

NOTES = ("begin_op", "wait_in", "wait_for", "set_instruction", "set_field", "set_activity")


class _Owner:
    """Starts an operation that does nothing, with and without a note."""

    group: Any = None

    def bare(self, x: torch.Tensor) -> None:
        """Do nothing."""

    with_note = recorded("all_reduce")(bare)


def nanoseconds(function: Callable[[], object], times: int = 500) -> float:
    """Return the duration of a call, the best of many rounds."""
    best = float("inf")
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(times):
            function()
        best = min(best, time.perf_counter() - began)
    return best / times * 1e9


def cost_of_notes() -> dict[str, float]:
    """Return call -> nanoseconds; "recorded" is the cost that the decorator adds."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    owner, x, progress = _Owner(), torch.zeros(4), PROGRESS
    group = owner.group = dist.group.WORLD
    progress.share()
    record = progress.begin_op("all_reduce", group, 8)
    empty = nanoseconds(lambda: None)

    def cost(note: Callable[[], object]) -> float:
        return nanoseconds(note) - empty

    def wait_for() -> None:
        progress.wait_for(1)
        progress.wait_for(None)

    def wait_in() -> None:
        progress.wait_in(record)
        progress.wait_in(0)

    found = {
        "begin_op": cost(lambda: progress.begin_op("all_reduce", group, 8)),
        "wait_in": cost(wait_in) / 2,
        "wait_for": cost(wait_for) / 2,
        "set_instruction": cost(lambda: progress.set_instruction(1)),
        "set_field": cost(lambda: progress.set_field(Field.ITERATION, 1)),
        "set_activity": cost(lambda: progress.set_activity("training")),
    }
    whole = cost(lambda: owner.with_note(x)) - cost(lambda: owner.bare(x))
    found["recorded"] = max(0.0, whole - found["begin_op"] - 2 * found["wait_in"])
    dist.destroy_process_group()
    return found


# Jobs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Figures of a job, per step."""

    step_s: float
    processor_s: float
    """Processor seconds of all ranks."""
    watchdog_s: float
    calls: dict[str, float]
    """Number of notes of the rank with the most notes."""


def run_job(layout: str, *flags: str, counts: bool = False) -> Measured:
    """Train under torchrun and return the measurements of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, REPORT: folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1",
                       "LATTICE_DEVICE": "cpu", **({COUNTS: "1"} if counts else {})}  # fmt: skip
        words = [*MODEL.split(), *LAYOUTS[layout].split(), *flags]
        job = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m", "benchmarks.heartbeat",
             *words],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        seen: list[tuple[float, float]] = []
        while job.poll() is None:
            time.sleep(0.5)
            seen += _watchdog_times(folder)
        # Without the start of the watchdog, once per job.
        (first, last) = (seen[len(seen) // 4], seen[-1]) if seen else ((0.0, 0.0), (1.0, 0.0))
        watchdog_share = (last[1] - first[1]) / (last[0] - first[0])
        assert job.stderr is not None
        if job.returncode:
            raise SystemExit(job.stderr.read().decode()[-2000:])
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
    step_s = max(rank["step_s"] for rank in found)
    return Measured(
        step_s,
        sum(rank["processor_s"] for rank in found),
        watchdog_share * step_s,
        max((rank["calls"] for rank in found), key=lambda calls: sum(calls.values())),
    )


def _watchdog_times(folder: str) -> list[tuple[float, float]]:
    """Return (now, processor seconds so far) of a job's watchdog, if there is one."""
    for place in Path("/proc").iterdir():
        try:
            if WATCHDOG not in (place / "cmdline").read_bytes():
                continue
            if f"{REPORT}={folder}".encode() not in (place / "environ").read_bytes():
                continue
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = int(fields[11]) + int(fields[12])
        return [(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"))]
    return []


def main() -> None:
    """Print a line per layout."""
    flags = read_command_line(Flags, prog="python -m benchmarks.heartbeat", description=__doc__)
    cost = cost_of_notes()
    print("ns: " + ", ".join(f"{name} {value:.0f}" for name, value in cost.items()))
    for layout in flags.layouts or LAYOUTS:
        counted = run_job(layout, counts=True)
        seen, blind = [], []
        for _ in range(flags.pairs):
            seen.append(run_job(layout))
            blind.append(run_job(layout, "--ft-rank-heartbeat-timeout", "0"))
        step_s = statistics.median(job.step_s for job in seen)
        with_it = statistics.median(job.processor_s for job in seen)
        without = statistics.median(job.processor_s for job in blind)
        watchdog = statistics.median(job.watchdog_s for job in seen)
        differences = [
            one.processor_s / two.processor_s - 1 for one, two in zip(seen, blind, strict=True)
        ]
        shown = ", ".join(f"{difference:+.2%}" for difference in differences)
        notes = sum(counted.calls.values())
        ns = sum(count * cost[name] for name, count in counted.calls.items())
        ns += counted.calls.get("begin_op", 0.0) * cost["recorded"]
        print(
            f"{layout}: step {step_s * 1e3:.1f} ms, {notes:.0f} notes of {ns / 1e3:.0f} us: "
            f"{ns / 1e9 / (without / 2):.2%} of the processor time of a step; "
            f"ranks {with_it * 1e3:.1f} ms of processor time with the watchdog, "
            f"{without * 1e3:.1f} ms without ({shown}); "
            f"the watchdog itself {watchdog * 1e3:.3f} ms: {watchdog / without:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    if REPORT in os.environ:
        run_rank()
    else:
        main()
