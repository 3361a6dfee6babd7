"""What tests ask the machine, and what they take away from it."""

import socket
from pathlib import Path

ONE_MACHINE = ("--standalone", "--local-addr", "127.0.0.1")
"""Flags with which torchrun starts ranks on this machine. Without the address it asks for the full
name of the machine, which takes seconds where nothing resolves names."""


def memory_bytes(name: str) -> int:
    """Return a memory figure of this process: VmRSS, VmHWM (its peak) or RssFile (of files)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
