"""What tests ask the machine, and what they take away from it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.transport.shm.shm_collectives import OFF


def resident_bytes(name: str) -> int:
    """Return a memory figure of this process: VmRSS now, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def resident_mib() -> float:
    """Return what of this process is in memory now, in MiB."""
    return resident_bytes("VmRSS") / (1 << 20)


@contextmanager
def no_shared_memory() -> Iterator[None]:
    """Inside, what ranks of one machine begin to use is not in shared memory."""
    os.environ[OFF] = "0"
    try:
        yield
    finally:
        del os.environ[OFF]
