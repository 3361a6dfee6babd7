"""Hostfiles, and commands that run on several nodes at the same time."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import ConfigError

_POLL_S = 0.2

Slots = dict[str, list[int]]
"""Host -> numbers of the accelerators to use there, in order."""


@dataclass(frozen=True)
class Node:
    """One node of a run."""

    host: str
    slots: tuple[int, ...]
    command: tuple[str, ...]
    """What is run there."""
    environment: Mapping[str, str]
    """Variables that the command needs beside those of a login."""

    def shell(self, directory: str) -> str:
        """Return the command as one line for a shell on that node."""
        exports = "".join(f"export {n}={shlex.quote(v)}; " for n, v in self.environment.items())
        return f"cd {shlex.quote(directory)}; {exports}{shlex.join(self.command)}"


def read_hostfile(text: str, name: str) -> Slots:
    """Return the nodes of a hostfile in order.

    Raises:
        ConfigError: a line is not `host slots=N`, a host is there twice, or there is none.
    """
    found: Slots = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        match = re.fullmatch(r"([^\s-]\S*) slots=([1-9]\d*)", " ".join(words))
        if match is None or match[1] in found:
            what = "a host that is there already" if match else "not understood"
            raise ConfigError(
                f"{name}, line {number}: {line.strip()!r} is {what}.",
                rule="a hostfile has one line for each host: its name, and slots=N",
                flags=["--hostfile"],
                fix="write lines such as: worker-1 slots=8",
            )
        found[match[1]] = list(range(int(match[2])))
    if not found:
        raise ConfigError(
            f"{name} names no host.",
            rule="a hostfile has one line for each host: its name, and slots=N",
            flags=["--hostfile"],
            fix="write lines such as: worker-1 slots=8",
        )
    return found


def slots_in(path: str) -> Slots:
    """Return the nodes of a file.

    Raises:
        ConfigError: it cannot be read, or is no hostfile.
    """
    try:
        return read_hostfile(Path(path).read_text(), path)
    except OSError as error:
        raise ConfigError(
            f"--hostfile {path} cannot be read: {error.strerror}.",
            rule="it is a file with a line `host slots=N` for each machine",
            flags=["--hostfile"],
            fix="leave it out to use this machine alone",
        ) from None


def run_together(commands: Sequence[Sequence[str]]) -> int:
    """Run commands at the same time until all have ended; return the first exit status above 0.

    When one command fails, the others get SIGTERM: they would wait for it.
    """
    running = [subprocess.Popen(list(words)) for words in commands]
    status = 0
    try:
        while running:
            time.sleep(_POLL_S)
            ended = [process for process in running if process.poll() is not None]
            running = [process for process in running if process not in ended]
            failed = [process.returncode for process in ended if process.returncode]
            if failed and not status:
                status = failed[0]
                for process in running:
                    process.terminate()
    finally:
        for process in running:
            process.terminate()
    return status
