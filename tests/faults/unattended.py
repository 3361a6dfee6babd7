"""One run that nobody looks after, on two machines which fail every few steps.

A shell script starts torchrun on both machines, and starts both again after a failure.

The machines are network namespaces, and a stand-in for ssh enters them. A machine that is lost
comes back under another name, which is in the hostfile from then on.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron.core.dist_checkpointing import commit
from tests.faults.checks import References, check_curve, check_save_directory, newest
from tests.faults.job import ITERATION, MODEL, POLL_S, SCRIPT, TIMEOUT_SCALE
from tests.faults.namespaces import Machine, two_machines, why_not_here
from tests.faults.processes import MARK, Process, kill_all, processes_of
from tests.faults.result import Result
from tests.harness.pool import REPOSITORY

LAYOUT = "--tensor-model-parallel-size 2 --use-distributed-optimizer"
NUM_RANKS, SAVE_INTERVAL = 4, 5
MOST_STEPS = 10
"""Of an attempt, before the next failure."""
COME_BACK_S = 180.0 * TIMEOUT_SCALE
DISK_BYTES = 48 << 20
SSH = """#!/bin/bash
# ssh -tt HOST COMMAND: what runs there is told when this end is gone.
host="${@: -2:1}"; command="${@: -1}"
[ -e "$MACHINES/$host" ] || exit 255
read -r first interface < "$MACHINES/$host"
export GLOO_SOCKET_IFNAME=$interface TP_SOCKET_IFNAME=$interface
set -m
nsenter "--target=$first" --net bash -c "$command" &
child=$!
trap 'kill -HUP -- "-$child"' TERM HUP INT
wait "$child"; status=$?
while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done
[ -e "$MACHINES/$host" ] || exit 255
exit "$status"
"""
RESTARTS = """#!/bin/bash
# Run "$@" as rank 0 on the first machine and as rank 1 on the second until both end with 0.
# When one fails, the other gets SIGTERM and both start again.
while :; do
    mapfile -t hosts < "$MACHINES/../hosts"
    for rank in 0 1; do
        ssh -tt "${hosts[rank]}" "exec torchrun --nnodes 2 --node-rank $rank \\
            --nproc-per-node 2 --master-addr ${hosts[0]} --master-port 29500 $*" &
    done
    wait -n && wait -n && exit 0
    kill $(jobs -p)
    wait
done
"""


class Failure(Enum):
    """What happens."""

    KILL_RANK = "a rank is killed"
    KILL_LAUNCHER = "a torchrun is killed"
    KILL_WORKER = "a loader worker is killed"
    STOP_RANK = "a rank is stopped"
    FULL_DISK = "the disk is full"
    DAMAGED_CHECKPOINT = "bytes of the newest checkpoint change, and a rank is killed"
    LOST_MACHINE = "a machine is lost"


class _Gone(Exception):
    """The run does not come back, or is over."""


@dataclass(frozen=True)
class _Host:
    """A machine by the name that it has now."""

    machine: Machine
    address: str


class UnattendedRun:
    """The launcher, the machines it knows, and what lives on them."""

    def __init__(self, folder: Path, machines: tuple[Machine, Machine], num_steps: int) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.save, self.known = folder / "disk" / "save", folder / "machines"
        self.log = folder / "log"
        self._addresses = itertools.count(11)
        for name in ("machines", "bin", "tmp"):
            (folder / name).mkdir()
        (folder / "bin" / "ssh").write_text(SSH)
        (folder / "bin" / "ssh").chmod(0o755)
        self.hosts = [_Host(machine, self._new_name(machine)) for machine in machines]
        self._write_hostfile()
        words = [*MODEL.split(), *LAYOUT.split(), "--train-iters", str(num_steps)]
        words += ["--save", str(self.save), "--load", str(self.save), "--num-workers", "1"]
        words += ["--save-interval", str(SAVE_INTERVAL), "--most-recent-k", "4"]
        words += ["--metrics-jsonl", str(folder / "metrics"), "--slow-step", "0.05"]
        (folder / "bin" / "restarts").write_text(RESTARTS)
        command = ["bash", str(folder / "bin" / "restarts"), SCRIPT, *words]
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment |= {
            MARK: self.mark, "MACHINES": str(self.known), "PATH": path, "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1",
            "LATTICE_DEVICE": "cpu",
        }  # fmt: skip
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    # What it prints, and what lives -----------------------------------------------------------

    def num_steps(self) -> int:
        """Return how many steps it has printed, those that were taken again included."""
        return len(ITERATION.findall(self.log.read_text(errors="replace")))

    def launchers(self) -> list[Process]:
        """Return the torchruns."""
        living = processes_of(self.mark)
        return [p for p in living if p.rank is None and "torchrun" in " ".join(p.command[:3])]

    def ranks(self) -> list[Process]:
        """Return the living ranks."""
        parents = {process.pid for process in self.launchers()}
        living = processes_of(self.mark)
        return [p for p in living if p.parent in parents and p.rank is not None]

    def workers(self) -> list[Process]:
        """Return the loader workers of all ranks."""
        commands = {rank.pid: rank.command for rank in self.ranks()}
        living = processes_of(self.mark)
        return [p for p in living if commands.get(p.parent) == p.command]

    # Failures ---------------------------------------------------------------------------------

    def fail(self, failure: Failure, source: random.Random) -> None:
        """Let something happen."""
        if failure is Failure.LOST_MACHINE:
            self._lose_machine(source.randrange(2))
        elif failure is Failure.FULL_DISK:
            self._fill_disk()
        else:
            if failure is Failure.DAMAGED_CHECKPOINT:
                self._damage_newest(source)
            members = {Failure.KILL_LAUNCHER: self.launchers, Failure.KILL_WORKER: self.workers}
            candidates = members.get(failure, self.ranks)()
            if not candidates:
                raise _Gone(f"{failure.value}: there is none")
            victim = source.choice(sorted(p.pid for p in candidates))
            is_stop = failure is Failure.STOP_RANK
            os.kill(victim, signal.SIGSTOP if is_stop else signal.SIGKILL)

    def _lose_machine(self, number: int) -> None:
        host = self.hosts[number]
        (self.known / host.address).unlink()
        own = os.readlink(f"/proc/{host.machine.first}/ns/net")
        there = []
        for process in processes_of(self.mark):
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/net") == own:
                    there.append(process)
        kill_all(there)
        self.hosts[number] = _Host(host.machine, self._new_name(host.machine))
        self._write_hostfile()

    def _fill_disk(self) -> None:
        before = {rank.pid for rank in self.ranks()}
        with open(self.folder / "disk" / "filler", "wb") as filler, suppress(OSError):
            while True:
                filler.write(bytes(1 << 20))
                filler.flush()
        self.wait(lambda: not before & {r.pid for r in self.ranks()}, "the disk is full")
        (self.folder / "disk" / "filler").unlink()

    def _damage_newest(self, source: random.Random) -> None:
        iteration = newest(self.save)
        assert iteration is not None
        place = self.save / commit.iteration_directory(iteration)
        largest = max(place.rglob("*.*"), key=lambda path: path.stat().st_size)
        with suppress(FileNotFoundError), open(largest, "r+b") as file:
            file.seek(source.randrange(largest.stat().st_size // 2, largest.stat().st_size - 8))
            file.write(b"\xff\x00damage"[:8])

    def _new_name(self, machine: Machine) -> str:
        address = f"10.77.0.{next(self._addresses)}"
        machine.run("ip", "address", "add", f"{address}/24", "dev", machine.interface)
        (self.known / address).write_text(f"{machine.first} {machine.interface}\n")
        return address

    def _write_hostfile(self) -> None:
        lines = "".join(f"{host.address}\n" for host in self.hosts)
        (self.folder / "hosts.tmp").write_text(lines)
        os.replace(self.folder / "hosts.tmp", self.folder / "hosts")

    # Waiting ----------------------------------------------------------------------------------

    def wait(self, is_true: Callable[[], bool], doing: str, within_s: float = COME_BACK_S) -> None:
        """Wait for something.

        Raises:
            _Gone: it does not become true in time, or the launcher has ended.
        """
        deadline = time.monotonic() + within_s
        while not is_true():
            if self.process.poll() is not None:
                raise _Gone(f"the launcher ended with {self.process.returncode}: {doing}")
            if time.monotonic() > deadline:
                raise _Gone(f"nothing for {within_s:g} s: {doing}")
            time.sleep(10 * POLL_S)

    def wait_for_a_new_attempt(self, old: set[int], doing: str) -> None:
        """Wait until ranks that are all new have printed a step."""

        def are_new() -> bool:
            pids = {rank.pid for rank in self.ranks()}
            return len(pids) == NUM_RANKS and not pids & old

        self.wait(are_new, f"{doing}: new ranks")
        printed = self.num_steps()
        self.wait(lambda: self.num_steps() > printed, f"{doing}: a step")

    def end(self) -> None:
        """Kill what is left of it."""
        while left := processes_of(self.mark):
            kill_all(left)
            time.sleep(POLL_S)
        self.process.wait()


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Mount a small file system in memory."""
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    subprocess.run(["mount", *options], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)


def failures_of(number: int, source: random.Random) -> list[Failure]:
    """Return so many failures, of each kind as many, in a random order."""
    kinds = list(itertools.islice(itertools.cycle(Failure), number))
    source.shuffle(kinds)
    return kinds


def run_unattended(folder: Path, references: References, num_failures: int, seed: str) -> Result:
    """Let a run come to its end through all failures, and compare it with an undisturbed one."""
    result, began = Result(f"unattended/{num_failures}-failures"), time.monotonic()
    if reason := why_not_here():
        result.not_run = reason
        return result
    source = random.Random(seed)
    num_steps = (MOST_STEPS + SAVE_INTERVAL) * (num_failures + 1)
    folder.mkdir(parents=True)
    (folder / "place" / "disk").mkdir(parents=True)
    with two_machines() as machines, small_disk(folder / "place" / "disk"):
        run = UnattendedRun(folder / "place", machines, num_steps)
        try:
            disturbed = _disturb(run, failures_of(num_failures, source), source)
            last, first = time.monotonic(), _last_step(run)
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(60.0 + 2.0 * num_steps)
            result.ended_after_s = time.monotonic() - last
            result.facts = disturbed.text(result.ended_after_s / max(num_steps - first, 1))
            left = processes_of(run.mark)
            if left or run.process.returncode:
                shown = ", ".join(map(str, left))
                result.problems.append(
                    f"exit status {run.process.returncode}; still there: {shown}"
                )
            else:
                result.problems += check_save_directory(run.save, is_clean=True)
                reference = references.curve(NUM_RANKS, num_steps, LAYOUT)
                os.symlink(run.save, run.folder / "save")
                result.problems += check_curve(run.folder, reference, num_steps)
        except _Gone as error:
            result.problems.append(str(error))
        finally:
            run.end()
            if result.problems and (last_saved := newest(run.save)) is not None:
                name = commit.iteration_directory(last_saved)
                shutil.copytree(run.save / name, run.folder / name)
    result.seconds = time.monotonic() - began
    return result


@dataclass(frozen=True)
class _Disturbed:
    """What was measured from the first failure on, until the run had come back from the last."""

    returns_s: dict[Failure, list[float]]
    """Seconds from a failure to the next step."""
    num_steps: int
    """That count."""
    wall_s: float

    def text(self, step_s: float) -> str:
        """Say it, given the seconds of a step that nothing disturbs."""
        every = [x for times in self.returns_s.values() for x in times]
        between_s, mean_s = self.wall_s / len(every), statistics.mean(every)
        goodput = self.num_steps * step_s / self.wall_s
        # What is left of the time between failures without the return and half an interval's steps.
        formula = 1 - (mean_s + SAVE_INTERVAL * step_s / 2) / between_s
        kinds = "; ".join(
            f"{failure.value} {statistics.median(times):.1f} s"
            for failure, times in self.returns_s.items()
        )
        return (
            f"from a failure to the next step: median {statistics.median(every):.1f} s, longest"
            f" {max(every):.1f} s (medians: {kinds}); a failure every {between_s:.1f} s, a step"
            f" {step_s:.2f} s: goodput {100 * goodput:.1f} %, by the formula {100 * formula:.1f} %"
        )


def _disturb(run: UnattendedRun, failures: list[Failure], source: random.Random) -> _Disturbed:
    """Let all failures happen, each when the run has taken some steps since the one before it."""
    returns: dict[Failure, list[float]] = {}
    run.wait_for_a_new_attempt(set(), "the first attempt")
    run.wait(lambda: len(_saved(run.save)) > 1, "two checkpoints")
    began, first = time.monotonic(), _last_step(run)
    for number, failure in enumerate(failures, 1):
        doing = f"failure {number}, {failure.value}"
        wanted = run.num_steps() + source.randrange(MOST_STEPS)
        run.wait(lambda wanted=wanted: run.num_steps() >= wanted, f"before {doing}")
        old, at = {rank.pid for rank in run.ranks()}, time.monotonic()
        run.fail(failure, source)
        run.wait_for_a_new_attempt(old, doing)
        returns.setdefault(failure, []).append(time.monotonic() - at)
        print(f"    {doing}: {returns[failure][-1]:.1f} s to the next step", flush=True)
    return _Disturbed(returns, _last_step(run) - first, time.monotonic() - began)


def _saved(save: Path) -> list[int]:
    if not save.is_dir():
        return []
    return [
        c.iteration
        for c in commit.list_checkpoints(save).checkpoints
        if isinstance(c.iteration, int)
    ]


def _last_step(run: UnattendedRun) -> int:
    steps = ITERATION.findall(run.log.read_text(errors="replace"))
    return int(steps[-1])
