"""Nodes by name: hostfiles, and commands that are started on several nodes from here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import ConfigError
from megatron.launcher.job import Job
from megatron.launcher.plan import JobFile, LaunchPlan, node_script

_POLL_S = 0.2
_LONGEST_BACKOFF_S = 600

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
    """Run commands at the same time; return the first exit status that is not 0.

    When one fails the others are ended: they would wait for it.
    """
    running = [subprocess.Popen(list(command)) for command in commands]
    status = 0
    try:
        while running:
            time.sleep(_POLL_S)
            ended = [process for process in running if process.poll() is not None]
            running = [process for process in running if process.poll() is None]
            failed = [p.returncode for p in ended if p.returncode]
            if failed and not status:
                status = failed[0]
                for process in running:
                    process.terminate()
    finally:
        for process in running:
            process.terminate()
    return status


def run_with_restarts(commands: Sequence[Sequence[str]], *, restarts: int, backoff_s: int) -> int:
    """Run commands at the same time until all end with 0, or fail once more than `restarts`."""
    for attempt in range(restarts + 1):
        status = run_together(commands)
        if status == 0 or attempt == restarts:
            return status
        delay = min(backoff_s << attempt, _LONGEST_BACKOFF_S)
        print(
            f"lattice launch: status {status}; started again in {delay} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(delay)
    return status


def plan_ssh(job: Job) -> LaunchPlan:
    """Return an ssh command for each node, all started from here."""
    hosts = _hosts(job)
    lines = [
        "\n".join(node_script(job, str(job.nodes), str(number), hosts[0], str(job.master_port)))
        for number in range(job.nodes)
    ]
    here = f"cd {shlex.quote(str(Path.cwd()))}\n"
    # -tt: what runs there is told (SIGHUP) when this end is gone.
    commands = tuple(
        ("ssh", "-tt", *job.hosts.ssh_option, host, here + text)
        for host, text in zip(hosts, lines, strict=True)
    )
    return LaunchPlan((), commands, is_concurrent=True)


def plan_mpi(job: Job) -> LaunchPlan:
    """Return a script for each node, which mpirun starts there once.

    The rank of the task is that of Open MPI, or of MPICH and what comes from it.
    """
    hosts = _hosts(job)
    rank = '"${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"'
    path = f"{job.folder}/{job.name}-node.sh"
    lines = node_script(job, str(job.nodes), rank, hosts[0], str(job.master_port))
    text = "\n".join(["#!/bin/bash", f"cd {shlex.quote(str(Path.cwd()))}", *lines]) + "\n"
    command = (
        "mpirun", "-np", str(job.nodes), "--map-by", "ppr:1:node", "--bind-to", "none",
        "--host", ",".join(hosts), *job.hosts.ssh_option, "bash", path,
    )  # fmt: skip
    notes = ("Open MPI's options; with MPICH: mpiexec -n N -ppn 1 -hosts A,B bash " + path,)
    return LaunchPlan((JobFile(path, text),), (command,), notes, is_concurrent=True)


def _hosts(job: Job) -> list[str]:
    """Return the nodes that train, the first ones of the hostfile."""
    if not job.hosts.hostfile:
        raise ConfigError(
            "there is no hostfile.",
            rule="ssh and mpirun start the ranks on nodes that are named",
            flags=["--hostfile"],
            fix="give --hostfile with a line `host slots=N` for each node",
        )
    slots = slots_in(job.hosts.hostfile)
    if len(slots) < job.nodes:
        raise ConfigError(
            f"{job.hosts.hostfile} names {len(slots)} hosts, and nodes={job.nodes}.",
            rule="there are not more nodes than are named",
            flags=["--hostfile", "--nodes"],
            fix=f"use --nodes {len(slots)}",
        )
    chosen = list(slots)[: job.nodes]
    small = [host for host in chosen if len(slots[host]) < job.ranks_per_node]
    if small:
        raise ConfigError(
            f"{small[0]} has {len(slots[small[0]])} slots, and a node {job.ranks_per_node} ranks.",
            rule="a rank needs a slot",
            flags=["--gpus-per-node", "--hostfile"],
            fix=f"use --gpus-per-node {min(len(slots[host]) for host in chosen)}",
        )
    return chosen
