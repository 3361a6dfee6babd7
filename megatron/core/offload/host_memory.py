"""Available host memory of this process, and the error if it is too little."""

from __future__ import annotations

from pathlib import Path

from megatron.core.foundation.errors import ConfigError

RESERVE = 0.05
"""Share of the available memory that is not used."""


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the free bytes of the machine or of the process's memory cgroup; None if unknown.

    Page cache counts as available: the kernel frees it on demand.

    Args:
        root: root of the file system that contains /proc and /sys.
    """
    found = [_from_meminfo(root / "proc/meminfo"), *_from_cgroups(root)]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def host_memory_problem(
    needed_bytes: int, what: str, *, num_local_ranks: int = 1, available: int | None = None
) -> ConfigError | None:
    """Return the problem if the ranks of this machine together need more memory than is available.

    Args:
        needed_bytes: bytes that one rank needs.
        what: "optimizer state", for the message.
        num_local_ranks: ranks on this machine that will allocate as much.
        available: bytes; None reads `available_host_bytes`.
    """
    available = available_host_bytes() if available is None else available
    total = needed_bytes * num_local_ranks
    if available is None or total <= available * (1 - RESERVE):
        return None
    return ConfigError(
        f"{what} in host memory needs {_mib(needed_bytes)} per rank, {_mib(total)} for the"
        f" {num_local_ranks} ranks of this machine, which has {_mib(available)} left.",
        rule="offloaded state fits into host memory, with 5 % to spare",
        flags=["--optimizer-cpu-offload", "--optimizer-offload-fraction"],
        fix="lower --optimizer-offload-fraction, or keep the state in files with"
        " --optimizer-offload-path DIRECTORY",
    )


def _from_meminfo(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _from_cgroups(root: Path) -> list[int | None]:
    """Return the free bytes of each enclosing cgroup: version 2, or 1 where that is mounted."""
    found: list[int | None] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit_directory = top / path.lstrip("/")
        while limit_directory == top or top in limit_directory.parents:
            found.append(_left(limit_directory, *names))
            limit_directory = limit_directory.parent
    return found


def _left(limit_directory: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (limit_directory / limit_name).read_text().strip()
        used = int((limit_directory / usage_name).read_text())
        stat = (limit_directory / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    pairs = (line.split() for line in stat)
    cache = sum(int(value) for name, value in pairs if name in ("inactive_file", "active_file"))
    return max(0, int(limit) - used + cache)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
