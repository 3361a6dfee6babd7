"""Stage C: profile one micro batch, kernel by kernel, and the optimizer's step.

    python -m benchmarks.gpu.profile_step                # writes the compressed trace to $OUT
    python -m benchmarks.gpu.profile_step --rehearse     # a tiny model on the CPU

Prints one row for each family of kernels with its predicted time, one for the slowest kernels, and
one for the step: time with any kernel running, time between kernels, launches.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import workload
from benchmarks.gpu.speed import train, words_of
from benchmarks.gpu.workload import Row
from megatron.core.settings.command_line import read_command_line

PROFILED = 3
"""The traced step. Earlier steps allocate memory and compile kernels."""
NUM_KERNELS = 15
NO_FAMILY = "embedding, rest"

FAMILIES = {
    "optimizer": r"\boptimizer\b",
    "attention": r"attention|scaled_dot_product|scaleddotproduct|fmha|flash|sdpa",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(mm|addmm|bmm|baddbmm_?|_scaled_mm)$",
    "cross entropy": r"crossentropy|cross_entropy",
    "weight gradient into fp32": r"linear\w*backward",
    "SwiGLU": r"gated|silu",
    "norms, with residual": r"norm",
    "rotation, qkv copies": r"rotation|aten::(cos|sin)\b|splitwithsizes|permute|clone|aten::cat",
    "residual sums": r"addbackward|aten::add_?\b",
}
"""Family -> pattern of the kernel's name or of an operator around its launch; the first match."""

PREDICTED = {
    "optimizer": (25, 41.0, 33.0),
    "attention": (16, 18.1, 15.1),
    "products": (99, 164.0, 164.0),
    "cross entropy": (88, 11.2, 2.9),
    "weight gradient into fp32": (50, 8.0, 2.0),
    "SwiGLU": (16, 6.0, 6.0),
    "norms, with residual": (68, 3.2, 2.6),
    "rotation, qkv copies": (54, 2.1, 1.1),
    "residual sums": (16, 1.2, 0.6),
    NO_FAMILY: (31, 1.1, 0.5),
}
"""Family -> (launches, and ms on an H100 from the bytes and FLOPs of the step: of the first
prediction, and of the prediction with all proposed changes)."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Run a tiny model on the CPU."""


@dataclass(frozen=True)
class Work:
    """A kernel that ran; on a CPU, an operator that called no other operator.

    Attributes:
        begin_us, end_us: time on the device.
        around: names of the operators around its launch, the outermost first.
    """

    name: str
    begin_us: float
    end_us: float
    around: tuple[str, ...]

    @property
    def family(self) -> str:
        """Family of kernels that it belongs to."""
        words = "\n".join((*self.around, self.name))
        found = (
            name for name, pattern in FAMILIES.items()
            if re.search(pattern, words, re.IGNORECASE | re.MULTILINE)
        )  # fmt: skip
        return next(found, NO_FAMILY)


def work_of(events: Sequence[dict[str, Any]]) -> list[Work]:
    """Return the kernels on the device from the events of torch's profiler."""
    events = [event for event in events if event.get("ph") == "X"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    around = dict(_operators_around(events, is_cpu=not on_device))
    if not on_device:
        return [
            Work(e["name"], e["ts"], e["ts"] + e["dur"], around[id(e)])
            for e in events if id(e) in around
        ]  # fmt: skip
    launches = {
        e["args"]["correlation"]: id(e)
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    return [
        Work(
            e["name"], e["ts"], e["ts"] + e["dur"],
            around.get(launches.get(e.get("args", {}).get("correlation"), 0), ()),
        )
        for e in on_device
    ]  # fmt: skip


def _operators_around(
    events: Sequence[dict[str, Any]], *, is_cpu: bool
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (id, names of the operators around it) of launches, or of innermost operators."""
    operators, launches = ("cpu_op", "user_annotation"), ("cuda_runtime", "cuda_driver")
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in (*operators, *launches):
            threads[event["pid"], event["tid"]].append(event)
    for ordered in threads.values():
        ordered.sort(key=lambda e: (e["ts"], -e["dur"]))
        stack: list[dict[str, Any]] = []
        for place, event in enumerate(ordered):
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            names = tuple(outer["name"] for outer in stack)
            if event["cat"] in launches:
                yield id(event), names
                continue
            following = ordered[place + 1] if place + 1 < len(ordered) else None
            is_inner = following is None or following["ts"] >= event["ts"] + event["dur"]
            if is_cpu and is_inner and event["cat"] == "cpu_op":
                yield id(event), names
            stack.append(event)


def busy_us(work: Sequence[Work]) -> float:
    """Return the time with at least one running kernel."""
    total, until = 0.0, float("-inf")
    for each in sorted(work, key=lambda w: w.begin_us):
        total += max(0.0, each.end_us - max(each.begin_us, until))
        until = max(until, each.end_us)
    return total


def rows_of(work: Sequence[Work]) -> Iterator[Row]:
    """Yield the rows of a traced step."""
    milliseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    kernels: Counter[tuple[str, str]] = Counter()
    for each in work:
        ms, family = 1e-3 * (each.end_us - each.begin_us), each.family
        milliseconds[family] += ms
        launches[family] += 1
        kernels[family, each.name[:100]] += ms
    span = max(w.end_us for w in work) - min(w.begin_us for w in work)
    busy = busy_us(work)
    yield {
        "span ms": 1e-3 * span, "busy ms": 1e-3 * busy, "idle %": 100 * (1 - busy / span),
        "launches": len(work),
    }  # fmt: skip
    for family, (number, today, later) in PREDICTED.items():
        yield {
            "family": family, "ms": round(milliseconds[family], 3), "launches": launches[family],
            "predicted ms": [today, later], "predicted launches": number,
        }  # fmt: skip
    for (family, name), ms in kernels.most_common(NUM_KERNELS):
        yield {"kernel": name, "family": family, "ms": round(ms, 3)}


def main() -> None:
    """Trace one step of one micro batch."""
    prog = "python -m benchmarks.gpu.profile_step"
    options = read_command_line(Flags, prog=prog, description=__doc__)
    workload.choose_device(options.rehearse)
    work = workload.workload(options.rehearse)
    work = replace(work, num_micro_batches=1, num_steps=PROFILED)
    more = ["--profile", "--use-pytorch-profiler", "--profile-step-start", str(PROFILED),
            "--profile-step-end", str(PROFILED + 1)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        # Without --tensorboard-dir, which needs a library, this writes the trace.
        with contextlib.chdir(folder):
            train([*words_of(work), *more], Path(folder))
        trace = Path(folder) / "trace-rank0.json"
        if "OUT" in os.environ:
            compressed = Path(os.environ["OUT"]) / "trace.json.gz"
            with trace.open("rb") as source, gzip.open(compressed, "wb") as target:
                shutil.copyfileobj(source, target)
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    for row in rows_of(work_of(events)):
        workload.print_row(row)


if __name__ == "__main__":
    main()
