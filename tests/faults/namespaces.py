"""Two machines: network namespaces with a link between them and a launcher in each."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from tests.faults.checks import (
    References,
    check_message,
    check_newest,
    check_remains,
    check_resume,
    check_save_directory,
)
from tests.faults.job import MODEL, NUM_STEPS, SAVE_INTERVAL, Job
from tests.faults.moments import MissedMomentError, wait_for
from tests.faults.plan import Moment, Target
from tests.faults.processes import Process
from tests.faults.promises import Kept, Promise
from tests.faults.result import Result

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PROGRAMS = ("ip", "unshare", "nsenter")
_numbers = itertools.count()


class Act(Enum):
    """What happens to the second machine."""

    NOTHING = "nothing"
    KILL_RANK = "KILL/rank"
    KILL_LAUNCHER = "KILL/launcher"
    KILL_MACHINE = "KILL/all"
    TERM_LAUNCHER = "TERM/launcher"
    TERM_BOTH_LAUNCHERS = "TERM/both-launchers"
    STOP_RANK = "STOP/rank"
    LINK_INTERRUPTED = "link/interrupted"
    LINK_LOST = "link/lost"


@dataclass(frozen=True)
class NodeCase:
    """An act, what it must not harm, and how the job runs."""

    act: Act
    promise: Promise
    has_handler: bool = False
    num_workers: int = 2

    @property
    def name(self) -> str:
        """Say it in one word."""
        return f"namespaces/{self.act.value}" + "/handler" * self.has_handler


TIMEOUT_S = 60.0
"""--distributed-timeout-minutes 1: how long a rank waits for one that does not answer."""
CASES = (
    NodeCase(Act.NOTHING, Promise(Kept.END, 120.0, "nothing happens", is_success=True)),
    NodeCase(Act.KILL_RANK, Promise(Kept.LAST_SAVE, 60.0, "connections of the dead are closed")),
    NodeCase(
        Act.KILL_LAUNCHER, Promise(Kept.LAST_SAVE, 60.0, "its ranks end, and with them the others")
    ),
    NodeCase(Act.KILL_MACHINE, Promise(Kept.LAST_SAVE, 60.0, "connections of the dead are closed")),
    NodeCase(
        Act.TERM_LAUNCHER,
        Promise(Kept.LAST_STEP, 60.0, "a rank that is told to leave tells the others"),
        has_handler=True,
    ),
    NodeCase(
        Act.TERM_BOTH_LAUNCHERS,
        Promise(Kept.LAST_STEP, 25.0, "all save the same step"),
        has_handler=True,
    ),
    NodeCase(
        Act.LINK_INTERRUPTED,
        Promise(Kept.END, 120.0, "TCP sends again what was lost in some seconds", is_success=True),
    ),
    NodeCase(
        Act.LINK_LOST,
        Promise(Kept.LAST_SAVE, TIMEOUT_S + 60, "nobody answers: the timeout of collectives ends"),
    ),
    NodeCase(
        Act.STOP_RANK,
        Promise(Kept.LAST_SAVE, TIMEOUT_S + 60, "the rank does not answer: the same timeout"),
    ),
)


def why_not_here() -> str:
    """Return why there can be no namespaces, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this kernel or container refuses network namespaces"


@dataclass(frozen=True)
class Machine:
    """One namespace, which lives as long as its first process."""

    first: int
    interface: str

    @property
    def enter(self) -> list[str]:
        """Return the command that runs what follows it there."""
        return ["nsenter", f"--target={self.first}", "--net"]

    def run(self, *command: str) -> None:
        """Run a command there."""
        subprocess.run([*self.enter, *command], check=True, capture_output=True)

    def set_link(self, state: str) -> None:
        """Take the link down, or up."""
        self.run("ip", "link", "set", self.interface, state)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make two namespaces with a link; they vanish with their first processes."""
    name = f"lf{os.getpid() % 100000}x{next(_numbers)}"
    first = [subprocess.Popen(["unshare", "--net", "sleep", "3600"]) for _ in ADDRESSES]
    try:
        own = os.readlink("/proc/self/ns/net")
        while any(os.readlink(f"/proc/{p.pid}/ns/net") == own for p in first):
            time.sleep(0.01)
        machines = tuple(Machine(p.pid, f"{name}{end}") for p, end in zip(first, "ab", strict=True))
        ends = [machine.interface for machine in machines]
        add = ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]
        subprocess.run(add, check=True, capture_output=True)
        for machine, address in zip(machines, ADDRESSES, strict=True):
            move = ["ip", "link", "set", machine.interface, "netns", str(machine.first)]
            subprocess.run(move, check=True, capture_output=True)
            machine.run("ip", "address", "add", f"{address}/24", "dev", machine.interface)
            machine.run("ip", "link", "set", "lo", "up")
            machine.set_link("up")
        yield machines[0], machines[1]
    finally:
        for process in first:
            process.kill()
            process.wait()


def _start(machines: tuple[Machine, Machine], case: NodeCase, folder: Path) -> list[Job]:
    words = [*MODEL.split(), "--train-iters", str(NUM_STEPS), "--save", str(folder / "save")]
    words += ["--save-interval", str(SAVE_INTERVAL), "--load", str(folder / "save")]
    words += ["--metrics-jsonl", str(folder / "metrics"), "--slow-step", "0.1"]
    words += ["--num-workers", str(case.num_workers), "--distributed-timeout-minutes", "1"]
    words += ["--exit-signal-handler"] if case.has_handler else []
    return [
        Job(
            folder / f"machine-{number}",
            words,
            num_ranks=1,
            launcher_flags=(
                "--nnodes=2", f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}",
                "--master-port=29500",
            ),
            prefix=machine.enter,
            interface=machine.interface,
        )
        for number, machine in enumerate(machines)
    ]  # fmt: skip


def _may_stay(act: Act, machine: int, job: Job, process: Process) -> bool:
    """Return whether torchrun, over which training has no power, waits for another machine.

    A launcher whose ranks are done waits 300 s for one that is gone; one whose only rank is stopped
    does not hear that the other machine has given up.
    """
    if act is Act.STOP_RANK:
        return machine == 1
    is_waiting = act in (Act.TERM_LAUNCHER, Act.KILL_LAUNCHER) and machine == 0
    return is_waiting and process.pid == job.pid


def _act(act: Act, machines: tuple[Machine, Machine], jobs: list[Job]) -> None:
    first, second = jobs
    (rank,) = second.ranks().values()
    if act is Act.KILL_RANK:
        os.kill(rank.pid, signal.SIGKILL)
    elif act is Act.STOP_RANK:
        os.kill(rank.pid, signal.SIGSTOP)
    elif act is Act.KILL_LAUNCHER:
        os.kill(second.pid, signal.SIGKILL)
    elif act is Act.KILL_MACHINE:
        for pid in second.members(Target.ALL):
            os.kill(pid, signal.SIGKILL)
    elif act in (Act.TERM_LAUNCHER, Act.TERM_BOTH_LAUNCHERS):
        for job in (second, first) if act is Act.TERM_BOTH_LAUNCHERS else (second,):
            os.kill(job.pid, signal.SIGTERM)
    elif act in (Act.LINK_INTERRUPTED, Act.LINK_LOST):
        machines[1].set_link("down")
        if act is Act.LINK_INTERRUPTED:
            time.sleep(4.0)
            machines[1].set_link("up")


def run_on_two_machines(case: NodeCase, folder: Path, references: References, seed: str) -> Result:
    """Train on two machines, disturb the second, and look at what is left."""
    result, began = Result(case.name), time.monotonic()
    if reason := why_not_here():
        result.not_run = reason
        return result
    jobs: list[Job] = []
    try:
        with two_machines() as machines:
            folder.mkdir(parents=True)
            jobs += _start(machines, case, folder)
            # The last rank prints the steps, the first one what is saved.
            wait_for(jobs[1], Moment.STEP, random.Random(f"{seed} {case.name}"))
            saved_before = max(jobs[0].saved(), default=0)
            _act(case.act, machines, jobs)
            acted_at = time.monotonic()
            for number, job in enumerate(jobs):
                within_s = case.promise.within_s - (time.monotonic() - acted_at)
                may_stay = partial(_may_stay, case.act, number, job)
                if left := job.wait_until_gone(max(within_s, 0.0), may_stay):
                    shown = "; ".join(map(str, left))
                    result.problems.append(f"after {case.promise.within_s:g} s: {shown}")
            result.ended_after_s = time.monotonic() - acted_at
            for job in jobs:
                job.end()
        if case.act is Act.LINK_LOST:
            result.problems += [
                f"machine {number} gave no warning of a wait for rank {1 - number}"
                for number, job in enumerate(jobs)
                if f"for ranks on other machines: {1 - number} (" not in job.text()
            ]
        last_step, save = max(jobs[1].iterations(), default=0), folder / "save"
        for job in jobs:
            result.problems += check_remains(job, case.promise)
            result.problems += check_message(job, case.promise)
        result.problems += check_save_directory(save, is_clean=False)
        result.problems += check_newest(save, case.promise, saved_before, last_step, NUM_STEPS)
        result.problems += check_resume(folder, references.curve(2), 2)
        result.problems += check_save_directory(save, is_clean=True)
        result.facts = f"step {last_step}, saved {saved_before}"
    except MissedMomentError as error:
        result.problems.append(str(error))
    finally:
        for job in jobs:
            job.end()
        result.seconds = time.monotonic() - began
    return result
