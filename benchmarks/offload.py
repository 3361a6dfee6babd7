"""Train in less memory than the whole state needs, and measure the cost of offload.

    sudo python -m benchmarks.offload --directory /var/tmp

Needs Linux, root, and the memory controller of control groups (version 1 or 2). One process trains
the plain PyTorch GPT of `benchmarks.data_parallel` (34 million parameters, fp32: 513 MiB of state)
with AdamW. The moments are on the device, in host memory, and in a file in `--directory`; a last
run stores the weights in a file as well. Then a control group gets a memory limit half-way between
the needs of the first and the last run. In this group, the kernel kills the run that holds its
whole state, and the run with the files trains; the weights of all runs are compared by their hash.

"device" counts the bytes of weights, gradients and moments in the memory of the computation, "peak"
is the largest resident memory without mapped files. On a CPU the host is the device: offload to
host memory saves no bytes here, as the table shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data_parallel import CONFIG, Workload, backward, build_model, micro_batches
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag, no_flag
from tests.harness.machine import memory_bytes

PLACES = ("device", "host memory", "file", "file, weights too")
KILLED = -9


def settings_of(place: str, directory: str) -> dict[str, Any]:
    """Return the fields of `OptimizerConfig` that keep state in a place."""
    return {
        "device": {},
        "host memory": {"optimizer_cpu_offload": True},
        "file": {"optimizer_offload_path": directory},
        "file, weights too": {
            "optimizer_offload_path": directory,
            "use_distributed_optimizer": True,
        },
    }[place]


def sharding_of(place: str, directory: str) -> DistributedDataParallelConfig:
    """Return the settings that keep weights in a place."""
    if place != "file, weights too":
        return DistributedDataParallelConfig()
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", param_offload_path=directory
    )


@dataclass(frozen=True, kw_only=True)
class Flags(Workload):
    """Flags of the command line."""

    directory: str = tempfile.gettempdir()
    """Directory of the file of state."""
    optimizer: bool = no_flag(True)
    vocabulary: int = 16384
    microbatches: int = no_flag(1)
    steps: int = 4
    """Number of steps of each run."""
    place: str | None = flag(None, choices=PLACES, is_hidden=True)
    report: str | None = flag(None, is_hidden=True)


def train(options: Flags) -> dict[str, Any]:
    """Train with state in `options.place`; the main function of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    groups = ProcessGroupCollection.single()
    sharding = sharding_of(options.place, options.directory)
    ddp = DistributedDataParallel(CONFIG, sharding, build_model(options), pg_collection=groups)
    config = OptimizerConfig(lr=1e-3, **settings_of(options.place, options.directory))
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
    batches, seconds = micro_batches(0, options), []
    for _ in range(options.steps):
        begin = time.perf_counter()
        ddp.zero_grad_buffer()
        backward(ddp, batches, 0)
        finalize_model_grads([ddp], pg_collection=groups)
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    peak = (memory_bytes("VmHWM") - memory_bytes("RssFile")) / (1 << 20)
    digest = hashlib.sha256()
    with ddp.summon_full_params():
        for parameter in ddp.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy())
    held = [owned for buffer in ddp.gradient_buffers for owned in buffer.owned_gradients()]
    held += [] if sharding.param_offload_path else list(ddp.parameters())
    if options.place == "device":
        held += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return {
        "digest": digest.hexdigest(),
        "seconds": statistics.median(seconds[1:]),
        "device": sum(tensor.nbytes for tensor in held) / 2**20,
        "peak": peak,
    }


# Control groups -------------------------------------------------------------------------------


class ControlGroup:
    """A control group of this benchmark with a limit on memory."""

    def __init__(self, parent: Path, files: tuple[str, ...]) -> None:
        """
        Args:
            files: names of the limits of memory, and of memory and swap.
        """
        self._path = parent / f"lattice-offload-{os.getpid()}"
        self._files = files

    @classmethod
    def find(cls) -> ControlGroup | None:
        """Return a group below this process's group; None without the memory controller."""
        top = Path("/sys/fs/cgroup")
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
                return cls(top / "memory" / path.lstrip("/"), limits)
        controllers_file = top / "cgroup.subtree_control"
        if controllers_file.exists() and "memory" in controllers_file.read_text().split():
            return cls(top, ("memory.max", "memory.swap.max"))
        return None

    @contextmanager
    def limited(self, num_bytes: int) -> Iterator[Path]:
        """Create the group; yield the file that accepts the ids of its processes."""
        self._path.mkdir()
        try:
            for name in self._files:
                if (self._path / name).exists():
                    limit = 0 if "swap.max" in name else num_bytes
                    (self._path / name).write_text(str(limit))
            yield self._path / "cgroup.procs"
        finally:
            self._path.rmdir()


def problem() -> str | None:
    """Return why this machine cannot run the benchmark; None if it can."""
    if sys.platform != "linux":
        return "control groups are a part of Linux; this is " + sys.platform
    if os.geteuid() != 0:
        return "making control groups needs root; run it with sudo"
    if ControlGroup.find() is None:
        return "no memory controller in /sys/fs/cgroup"
    return None


def run(place: str, options: Flags, members: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Run a process, in a control group if its list of members is given.

    Returns:
        (exit status, result of `train`).
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        words = ["--place", place, "--report", str(report), *sys.argv[1:]]
        if members is None:
            command = [sys.executable, "-m", "benchmarks.offload"]
        else:
            # A shell joins the group before Python starts, so that all its memory counts.
            join = 'echo $$ > "$0"; exec "$@"'
            command = ["sh", "-c", join, str(members), sys.executable, "-m", "benchmarks.offload"]
        status = subprocess.run([*command, *words], check=False).returncode
        return status, json.loads(report.read_text()) if report.exists() else {}


def print_row(name: str, found: dict[str, Any], digest: str) -> None:
    """Print the measurements of a run."""
    same = "equal" if found["digest"] == digest else "DIFFERENT"
    print(
        f"{name:<26}{found['device']:>12.0f}{found['peak']:>10.0f}"
        f"{found['seconds'] * 1e3:>12.0f}   {same}",
        flush=True,
    )


def compare(options: Flags) -> int:
    """Run all; return the exit status."""
    print(f"{'state in':<26}{'device MiB':>12}{'peak MiB':>10}{'ms a step':>12}   weights")
    found = {}
    for place in PLACES:
        status, found[place] = run(place, options)
        if status:
            return status
        print_row(place, found[place], found["device"]["digest"])
    limit = (found["device"]["peak"] + found[PLACES[-1]]["peak"]) / 2
    group = ControlGroup.find()
    assert group is not None
    with group.limited(int(limit * 2**20)) as members:
        print(f"in a control group of {limit:.0f} MiB:")
        status, _ = run("device", options, members)
        was_killed = status == KILLED
        print(f"{'device':<26}" + ("killed: out of memory" if was_killed else f"exit {status}"))
        status, inside = run(PLACES[-1], options, members)
        if status:
            return status
        print_row(PLACES[-1], inside, found["device"]["digest"])
    digests = {report["digest"] for report in [*found.values(), inside]}
    return 0 if was_killed and len(digests) == 1 else 1


def main() -> int:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    if options.place is not None:
        Path(options.report).write_text(json.dumps(train(options)))
        return 0
    if reason := problem():
        print(f"cannot limit memory: {reason}", file=sys.stderr)
        return 2
    # Exit by an exception, so that cleanup runs if the command is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
