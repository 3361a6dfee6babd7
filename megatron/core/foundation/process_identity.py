"""Unique identities of processes: a process number is valid in one PID namespace, and is reused.

Containers can share /dev/shm, but each container numbers its processes itself: process 3 of one
container is another process in the next. An identity also has the machine, the namespace and the
start time.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

_FORM = struct.Struct("<QQQ16s")


class ProcessIdentity(NamedTuple):
    """One process, on one machine."""

    number: int
    namespace: int
    """Inode of its PID namespace."""
    start: int
    """When it started, in clock ticks after the boot of the machine."""
    machine: bytes
    """16 bytes that identify this boot of the machine."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of this process.

        Raises:
            OSError: the system has no /proc.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        return cls(
            os.getpid(),
            os.stat("/proc/self/ns/pid").st_ino,
            stat_of("self").start,
            hashlib.sha256(boot).digest()[:16],
        )

    def pack(self) -> bytes:
        """Return the identity as `SIZE` bytes."""
        return _FORM.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> ProcessIdentity:
        """Return the identity that `pack` wrote."""
        return cls(*_FORM.unpack(data))

    def open(self) -> int:
        """Return a descriptor of exactly this process.

        Raises:
            OSError: it has ended, is not one of this PID namespace, or is this process itself.
        """
        own = self.own()
        if (self.namespace, self.machine) != (own.namespace, own.machine):
            raise ProcessLookupError(f"process {self.number} is in another PID namespace")
        if self.number == own.number:
            raise ProcessLookupError(f"process {self.number} is this one")
        descriptor = os.pidfd_open(self.number)
        try:
            # Compare after opening: the descriptor keeps the process that has the number now.
            if stat_of(self.number).start != self.start:
                raise ProcessLookupError(f"process {self.number} has ended")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


SIZE = _FORM.size


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat (man 5 proc)."""

    letter: str
    """State: R, S, D, T and t (stopped), Z and X (ended)."""
    parent: int
    start: int
    """Start time, see `ProcessIdentity`."""
    wait_status: int
    """How it ended; valid until its parent waits for it."""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.letter in "ZX"


def stat_of(process: int | str) -> ProcessStat:
    """Return the state of a process of this PID namespace.

    Raises:
        OSError: there is no such process, or it is hidden.
    """
    file = os.open(f"/proc/{process}/stat", os.O_RDONLY)  # a watchdog reads it four times a second
    try:
        text = os.read(file, 4096)
    finally:
        os.close(file)
    # The second field, a name in parentheses, may hold anything.
    fields = text.rpartition(b")")[2].split()
    return ProcessStat(fields[0].decode(), int(fields[1]), int(fields[19]), int(fields[49]))
