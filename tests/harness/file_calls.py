"""Stop, tear or fail any call that changes a file, below Python and in several processes.

A small library is loaded before the C library (`file_calls.c`, compiled with gcc when needed). It
counts the calls that create, write, sync, rename, remove or cut files below one directory, in all
processes that were started from `run_again_with_calls_counted`, and acts on the one that is asked
for. Unlike a patch of `os` it also sees what native code does, and a kill is a kill.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("file_calls.c")
VARIABLE = "FILE_CALLS"


class Kind(IntEnum):
    """What a call does."""

    CREATE = 0
    WRITE = 1
    FSYNC = 2
    RENAME = 3
    UNLINK = 4
    MKDIR = 5
    RMDIR = 6
    TRUNCATE = 7


class Action(IntEnum):
    """What happens at a call."""

    COUNT = 0
    """Nothing: all calls are counted."""
    KILL = 1
    """The process dies before the call."""
    TEAR = 2
    """It dies after half of the bytes of a write, and before any other call."""
    FAIL_ONCE = 3
    """That call fails."""
    FAIL_FROM = 4
    """That call and those after it fail, if they are of the chosen kinds."""
    SHORT = 5
    """Every write takes half of what it is given."""


class _Entry(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("path", ctypes.c_char * 120))


class Control(ctypes.Structure):
    """The block of memory that all processes share; see `file_calls.c`."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("action", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("kinds", ctypes.c_int64),
        ("directory", ctypes.c_char * 1024),
        ("log", _Entry * 4096),
    )


@dataclass(frozen=True)
class Call:
    """A call that was counted."""

    kind: Kind
    path: str
    """Below the directory."""

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.path}"


class FileCalls:
    """Tells the library what to do; for the process that starts the others."""

    def __init__(self) -> None:
        with open(os.environ[VARIABLE], "r+b") as file:
            self._control = Control.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Control)))

    def watch(
        self,
        directory: Path,
        action: Action = Action.COUNT,
        *,
        at: int = 0,
        error: int = 0,
        kinds: Sequence[Kind] = tuple(Kind),
    ) -> None:
        """Count the calls below `directory` from 0 on, and act at number `at`."""
        self._control.directory = b""  # nothing is counted while the rest changes
        self._control.count, self._control.at = 0, at
        self._control.action, self._control.error = action, error
        self._control.kinds = sum(1 << kind for kind in kinds)
        self._control.directory = os.fsencode(directory)

    def end(self) -> list[Call]:
        """Count and act no longer; return the calls since `watch`."""
        self._control.directory = b""
        entries = self._control.log[: min(self._control.count, len(self._control.log))]
        return [Call(Kind(entry.kind), entry.path.decode()) for entry in entries]


def is_loaded() -> bool:
    """Whether the library is loaded into this process."""
    return VARIABLE in os.environ


def run_again_with_calls_counted(module: str, before: Sequence[str] = ()) -> int:
    """Run `python -m module`, with this program's arguments, under the library.

    Args:
        before: a command to run it under, such as strace with its options.
    Returns:
        its exit status.
    """
    with tempfile.TemporaryDirectory() as name:
        library, control = Path(name) / "file_calls.so", Path(name) / "control"
        compile_it = ["gcc", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([*compile_it, str(SOURCE), "-ldl"], check=True)
        control.write_bytes(bytes(ctypes.sizeof(Control)))
        environment = os.environ | {"LD_PRELOAD": str(library), VARIABLE: str(control)}
        line = [*before, sys.executable, "-m", module, *sys.argv[1:]]
        return subprocess.run(line, env=environment).returncode
