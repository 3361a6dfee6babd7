"""The processes of a job, as /proc shows them: who they are, and what they hold."""

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.process_identity import stat_of

MARK = "LATTICE_FAULTS_JOB"
"""An environment variable that every process of a job inherits."""


@dataclass(frozen=True)
class Process:
    """What /proc says of a process that is not a zombie."""

    pid: int
    parent: int
    state: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def rank(self) -> int | None:
        """Its rank, where a launcher gave it one."""
        rank = self.environment.get("RANK")
        return None if rank is None else int(rank)

    def has_mapped(self, library: str) -> bool:
        """Return whether the library is loaded."""
        with contextlib.suppress(OSError):
            return library in Path(f"/proc/{self.pid}/maps").read_text()
        return False

    def __str__(self) -> str:
        return f"{self.pid} ({self.state}) {' '.join(self.command)[:100]}"


def read_process(pid: int) -> Process | None:
    """Return the process; None if it has ended, or is not ours to read."""
    place = Path(f"/proc/{pid}")
    try:
        environment = (place / "environ").read_bytes()
        stat = stat_of(pid)
        command = (place / "cmdline").read_bytes()
    except OSError:
        return None
    if stat.has_ended:
        return None
    pairs = (item.partition("=") for item in environment.decode(errors="replace").split("\0"))
    words = command.decode(errors="replace").split("\0")
    return Process(
        pid, stat.parent, stat.letter, tuple(words), {name: value for name, _, value in pairs}
    )


def processes_of(mark: str) -> list[Process]:
    """Return the living processes that carry the mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted in file.read() and (process := read_process(int(name))) is not None:
                found.append(process)
    return found


def kill_all(processes: Iterable[Process]) -> None:
    """End processes at once."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def listening_sockets(pids: Iterable[int]) -> dict[str, str]:
    """Return inode -> local address (hexadecimal) of the sockets that processes listen on."""
    found: dict[str, str] = {}
    for pid in pids:
        listening = all_listening(pid)
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                    if inode in listening:
                        found[inode] = listening[inode]
    return found


def all_listening(pid: int | str = "self") -> dict[str, str]:
    """Return inode -> local address of every socket that listens where process `pid` is."""
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":  # TCP_LISTEN
                    found[fields[9]] = fields[1]
    return found
