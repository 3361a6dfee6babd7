"""Nodes by name: hostfiles, and commands that are started on several nodes from here."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.failure_file import (
    FAILURE_FILE,
    USELESS_TO_REPEAT,
    read_quarantine,
    restart_delay_s,
)
from megatron.launcher.job import Job
from megatron.launcher.plan import JobFile, LaunchPlan, node_script

_POLL_S = 0.2
_TICK_S = 0.02
"""Longer than a tick of the clock that stamps files, which is a few milliseconds."""
_SSH_FAILED = 255
"""Exit status of ssh that cannot reach a host, or has lost it."""

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


@dataclass(frozen=True)
class Attempt:
    """How commands that ran together ended."""

    status: int
    """The first exit status that is not 0."""
    first: int = 0
    """Which command that was."""


def run_together(commands: Sequence[Sequence[str]]) -> Attempt:
    """Run commands at the same time until all have ended.

    When one fails the others are ended: they would wait for it.
    """
    running = {number: subprocess.Popen(list(words)) for number, words in enumerate(commands)}
    attempt = Attempt(0)
    try:
        while running:
            time.sleep(_POLL_S)
            ended = {n: process for n, process in running.items() if process.poll() is not None}
            running = {n: process for n, process in running.items() if n not in ended}
            failed = [n for n, process in ended.items() if process.returncode]
            if failed and not attempt.status:
                attempt = Attempt(ended[failed[0]].returncode, failed[0])
                for process in running.values():
                    process.terminate()
    finally:
        for process in running.values():
            process.terminate()
    return attempt


def run_with_restarts(job: Job, plan_for: Callable[[frozenset[str]], LaunchPlan]) -> int:
    """Run a job until it ends with 0, has failed too often, or would fail in the same way.

    A host that ssh does not reach, or lost, is left out from then on; the next attempt has another
    one of the hostfile, or fewer. The pause before an attempt grows with those in a row
    that came no further than one before them.

    Args:
        plan_for: makes the commands of an attempt, without some hosts.
    """
    lost: frozenset[str] = frozenset()
    last, times, began = "", 0, time.time()
    furthest, in_a_row = -1, -1
    plan = plan_for(lost)
    for number in range(job.max_restarts + 1):
        attempt = run_together(plan.commands)
        if attempt.status == 0 or number == job.max_restarts:
            break
        failure = _failure_since(began, job)
        cause = " ".join(str(failure.get(name)) for name in ("class", "iteration", "rank", "where"))
        times = times + 1 if failure and cause == last else 1
        last = cause
        if failure.get("class") in USELESS_TO_REPEAT or times >= job.hosts.same_failures:
            _say(f"the same failure would come again: {failure.get('message')}")
            break
        if attempt.status == _SSH_FAILED and plan.hosts:
            lost |= {plan.hosts[attempt.first]}
            _say(f"{plan.hosts[attempt.first]} is lost")
        reached = int(str(failure.get("iteration") or 0))
        in_a_row = in_a_row + 1 if reached <= furthest else 0
        furthest = max(furthest, reached)
        delay = restart_delay_s(job.backoff_s, in_a_row)
        _say(f"status {attempt.status}; started again in {delay} s")
        time.sleep(delay)
        began = time.time()
        try:
            plan = plan_for(lost)
        except ConfigError as error:
            _say(str(error))
            break
    return attempt.status


def _say(text: str) -> None:
    print(f"lattice launch: {text}", file=sys.stderr, flush=True)


def _failure_since(began: float, job: Job) -> Mapping[str, object]:
    """Return what failure.json in the save directory says of an attempt; {} if nothing."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(job.value_of("--save"), FAILURE_FILE)
        if path.stat().st_mtime >= began - _TICK_S:
            found: Mapping[str, object] = json.loads(path.read_text(encoding="utf-8"))
            return found
    return {}


def plan_ssh(job: Job, lost: frozenset[str] = frozenset()) -> LaunchPlan:
    """Return an ssh command for each node, all started from here.

    Args:
        lost: hosts that are left out.
    """
    hosts = _hosts(job, lost)
    lines = [
        "\n".join(node_script(job, str(len(hosts)), str(number), hosts[0], str(job.master_port)))
        for number in range(len(hosts))
    ]
    here = f"cd {shlex.quote(str(Path.cwd()))}\n"
    # -tt: what runs there is told (SIGHUP) when this end is gone.
    commands = tuple(
        ("ssh", "-tt", *job.hosts.ssh_option, host, here + text)
        for host, text in zip(hosts, lines, strict=True)
    )
    return LaunchPlan((), commands, is_concurrent=True, hosts=tuple(hosts))


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


def _hosts(job: Job, lost: frozenset[str] = frozenset()) -> list[str]:
    """Return the nodes that train: the first ones of the hostfile that are neither lost nor in the
    quarantine of the training command.

    Raises:
        ConfigError: there are too few.
    """
    if not job.hosts.hostfile:
        raise ConfigError(
            "there is no hostfile.",
            rule="ssh and mpirun start the ranks on nodes that are named",
            flags=["--hostfile"],
            fix="give --hostfile with a line `host slots=N` for each node",
        )
    slots = slots_in(job.hosts.hostfile)
    list_of_bad = job.value_of("--quarantine-file")
    avoided = lost | set(read_quarantine(list_of_bad) if list_of_bad else ())
    usable = [host for host in slots if host not in avoided]
    if len(usable) < (job.hosts.min_nodes or job.nodes):
        left_out = ", ".join(host for host in slots if host in avoided)
        raise ConfigError(
            f"{job.hosts.hostfile} names {len(slots)} hosts, and nodes={job.nodes}"
            + (f"; {left_out} are lost or in the quarantine." if left_out else "."),
            rule="there are not more nodes than are named and can be used",
            flags=["--hostfile", "--nodes", "--quarantine-file"],
            fix=f"use --nodes {len(usable)}, or name more hosts",
        )
    chosen = usable[: job.nodes]
    small = [host for host in chosen if len(slots[host]) < job.ranks_per_node]
    if small:
        raise ConfigError(
            f"{small[0]} has {len(slots[small[0]])} slots, and a node {job.ranks_per_node} ranks.",
            rule="a rank needs a slot",
            flags=["--gpus-per-node", "--hostfile"],
            fix=f"use --gpus-per-node {min(len(slots[host]) for host in chosen)}",
        )
    return chosen
