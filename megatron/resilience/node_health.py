"""Check nodes before a run: GPUs, an all-reduce over all ranks, clocks, disk, versions.

    python -m megatron.resilience.node_health --num-gpus 8         # this node alone
    torchrun ... -m megatron.resilience.node_health --num-gpus 8   # all nodes

If a check fails, the exit status is 1 on all ranks and rank 0 prints the reason.
examples/cluster/pretrain.sbatch runs these checks before the training.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.foundation import device, optional_imports
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.transport.object_collectives import all_gather_object
from megatron.training.launch.rank_info import read_rank_info

_TIMEOUT = timedelta(minutes=5)
_MATRIX_SIZE = 512
_LIBRARIES = ("numpy", "transformer_engine", "flash_attn", "apex", "triton")
_GIB = 1 << 30


class State(Enum):
    """The outcome of a check."""

    FINE = "ok"
    ABSENT = "--"
    PROBLEM = "!!"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    section: str
    name: str
    text: str
    state: State = State.FINE


def version_of(library: str) -> str | None:
    """Return the version of an installed library by its import name, or None."""
    if not optional_imports.has(library):
        return None
    for name in metadata.packages_distributions().get(library, [library]):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


@dataclass(frozen=True, kw_only=True)
class CheckFlags:
    """The command line."""

    num_gpus: int = 0
    """Number of GPUs that this node must have; 0 skips the check."""
    directory: tuple[str, ...] = ()
    """Directories to which the run writes."""
    min_free_gib: float = 10.0
    """Free space that each of these directories must have, in GiB."""
    min_shared_memory_gib: float = 1.0
    """Size that /dev/shm must have, in GiB."""
    max_clock_difference_s: float = 2.0
    """Largest difference between the clocks of two nodes, in seconds."""
    all_reduce_mib: float = 16.0
    """Size of the all-reduce that is timed, in MiB."""


@dataclass(frozen=True)
class NodeReport:
    """The results of one rank, which all ranks gather."""

    host: str
    rank: int
    clock_s: float
    """Wall clock right after a barrier."""
    versions: dict[str, str]
    problems: tuple[str, ...]
    bandwidth: float
    """Bandwidth of the all-reduce, in bytes per second and rank."""


def examine_node(flags: CheckFlags) -> Iterator[CheckResult]:
    """Yield the checks of this node."""
    yield from _gpus(flags.num_gpus)
    for directory in flags.directory:
        yield _disk(directory, flags.min_free_gib)
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total / _GIB
        is_enough = size >= flags.min_shared_memory_gib
        text = f"{size:.1f} GiB" + (
            "" if is_enough else f", less than {flags.min_shared_memory_gib}"
        )
        yield CheckResult("node", "/dev/shm", text, State.FINE if is_enough else State.PROBLEM)


def _gpus(wanted: int) -> Iterator[CheckResult]:
    """Yield whether the GPUs exist and multiply correctly."""
    if not wanted:
        return
    found = 0 if device.device_type() == "cpu" else torch.accelerator.device_count()
    if found < wanted:
        yield CheckResult("node", "GPUs", f"{found}, but {wanted} are needed", State.PROBLEM)
        return
    expected = torch.full((_MATRIX_SIZE, _MATRIX_SIZE), float(_MATRIX_SIZE))
    for number in range(wanted):
        where = torch.device(device.device_type(), number)
        try:
            ones = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, device=where)
            is_right = torch.equal((ones @ ones).cpu(), expected)
            text = "multiplies" if is_right else "multiplies wrongly"
        except RuntimeError as error:
            is_right, text = False, f"does not compute: {str(error).splitlines()[0]}"
        state = State.FINE if is_right else State.PROBLEM
        yield CheckResult("node", f"GPU {number}", text, state)


def _disk(directory: str, min_free_gib: float) -> CheckResult:
    """Return whether a directory, or its nearest existing parent, can be written."""
    place = Path(directory).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return CheckResult("node", directory, f"cannot be written: {error.strerror}", State.PROBLEM)
    free = shutil.disk_usage(place).free / _GIB
    if free < min_free_gib:
        text = f"{free:.1f} GiB free, less than {min_free_gib}"
        return CheckResult("node", directory, text, State.PROBLEM)
    return CheckResult("node", directory, f"{free:.0f} GiB free")


def time_all_reduce(num_bytes: int, repeats: int = 5) -> float:
    """Sum ones over all ranks; return bytes per second and rank, or 0 if the sum is wrong.

    Communication:
        `repeats` + 2 all-reduces over all ranks; the last one, of one number, is a barrier.
    """
    ones = torch.ones(max(1, num_bytes // 4), device=device.current_device())
    dist.all_reduce(ones)
    is_right = bool((ones == dist.get_world_size()).all())
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(ones.fill_(1.0))
    device.synchronize()
    elapsed = time.perf_counter() - begin
    is_right = is_right and bool((ones == dist.get_world_size()).all())
    dist.all_reduce(ones[:1])
    device.synchronize()
    return repeats * ones.numel() * ones.element_size() / elapsed if is_right else 0.0


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes."""
    found = {name: version_of(name) or "missing" for name in _LIBRARIES}
    return {
        "python": platform.python_version(), "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda), "NCCL": device.nccl_version(), **found,
    }  # fmt: skip


def compare(reports: Sequence[NodeReport], max_clock_difference_s: float) -> list[CheckResult]:
    """Return the problems of single nodes, and the differences between nodes."""
    found = []
    for report in reports:
        for problem in report.problems:
            name = f"{report.host} (rank {report.rank})"
            found.append(CheckResult("node", name, problem, State.PROBLEM))
    for library in reports[0].versions:
        hosts: dict[str, list[str]] = {}
        for report in reports:
            hosts.setdefault(report.versions.get(library, "missing"), []).append(report.host)
        if len(hosts) > 1:
            shown = "; ".join(
                f"{version} on {', '.join(sorted(set(names)))}" for version, names in hosts.items()
            )
            found.append(CheckResult("nodes", library, f"different: {shown}", State.PROBLEM))
    early = min(reports, key=lambda report: report.clock_s)
    late = max(reports, key=lambda report: report.clock_s)
    difference = late.clock_s - early.clock_s
    text = f"{difference:.3f} s between {early.host} and {late.host}"
    is_large = difference > max_clock_difference_s
    found.append(CheckResult("nodes", "clocks", text, State.PROBLEM if is_large else State.FINE))
    slowest = min(reports, key=lambda report: report.bandwidth)
    text = f"correct over {len(reports)} ranks, {slowest.bandwidth / 1e9:.2f} GB/s per rank"
    found.append(CheckResult("nodes", "all-reduce", text))
    return found


def examine_nodes(flags: CheckFlags, rank: int, local_rank: int) -> list[CheckResult]:
    """Return the results of all nodes and of comparisons between nodes, equal on all ranks.

    Communication:
        a timed all-reduce, barriers, and an all-gather of reports, over all ranks.
    """
    device.set_local_device(local_rank)
    dist.init_process_group(device.communication_backend(), timeout=_TIMEOUT)
    own = list(examine_node(flags)) if local_rank == 0 else []
    problems = [f"{one.name}: {one.text}" for one in own if one.state is State.PROBLEM]
    try:
        bandwidth = time_all_reduce(int(flags.all_reduce_mib * (1 << 20)))
        if bandwidth <= 0:
            problems.append("the all-reduce over all ranks returned a wrong sum")
        clock = time.time()
        report = NodeReport(
            socket.gethostname(), rank, clock, versions(), tuple(problems), bandwidth
        )
        world = dist.group.WORLD
        reports = [report] if world is None else all_gather_object(report, world)
    finally:
        dist.destroy_process_group()
    return compare(reports, flags.max_clock_difference_s)


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Check this node, or all nodes under torchrun; return the exit status."""
    flags = read_command_line(CheckFlags, argv, description=__doc__)
    info = read_rank_info()
    if info.is_launched:
        found = examine_nodes(flags, info.rank, info.local_rank)
    else:
        found = list(examine_node(flags))
    if info.rank == 0:
        for one in found:
            print(f"{one.state.value} {socket.gethostname()} {one.name}: {one.text}", flush=True)
    is_wrong = any(one.state is State.PROBLEM for one in found)
    return ExitStatus.FAILED if is_wrong else ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
