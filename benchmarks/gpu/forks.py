"""Run trainings in forks of one process that has imported all modules but has used no device.

Imports take seconds of processor time, a fork takes milliseconds. Forks cannot use CUDA after their
parent has initialised it. `run_cases` tests this first; if forks fail, it starts new processes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# Set before torch counts devices: CUDA's own count would prevent forks from using CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch._dynamo  # torch's optimizers import it: otherwise 1.5 s in every rank
import torch.distributed.fsdp

import pretrain_gpt
from megatron.core.foundation import device

_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([-+.\dEe]+|nan|inf)")
Main = Callable[[], None] | None
_FAILED, _NO_ACCELERATOR = 1, 2
FOLDER = "{folder}"
"""Placeholder in a run's flags: a folder of its case, shared by all its runs."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training on one or several ranks."""

    words: tuple[str, ...]
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """Consecutive runs.

    Attributes:
        environment: additional environment variables of the ranks.
        loses_rank: kill the last rank with SIGKILL after the first step; the other ranks must exit
            without help, and their output must name the killed rank.
    """

    name: str
    runs: tuple[Run, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    loses_rank: bool = False

    @property
    def num_ranks(self) -> int:
        """Return the largest number of ranks that run at the same time."""
        return max(run.num_ranks for run in self.runs)


@dataclass
class Outcome:
    """Result of a case.

    Attributes:
        problem: empty if every rank of every run ended with status 0.
        losses: step -> loss, from the logs.
    """

    case: Case
    problem: str
    seconds: float
    losses: dict[int, float]
    log: str


class _Job:
    """A running case."""

    def __init__(self, case: Case, folder: Path, limit_s: float, main: Main, *, forks: bool):
        self.case, self.folder, self.main, self.forks = case, folder, main, forks
        self.folder.mkdir(parents=True)
        self.log = folder / "log"
        self.begin = time.monotonic()
        self.end = self.begin + limit_s
        self.statuses: dict[int, int | None] = {}
        self.pids: dict[int, int] = {}
        self.next_run = 0
        self.lost: int | None = None
        self.start_run()

    def start_run(self) -> None:
        run = self.case.runs[self.next_run]
        self.next_run += 1
        words = [word.replace(FOLDER, str(self.folder)) for word in run.words]
        variables = dict(self.case.environment)
        if run.num_ranks > 1:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
                          "WORLD_SIZE": str(run.num_ranks),
                          "LOCAL_WORLD_SIZE": str(run.num_ranks)}  # fmt: skip
        self.statuses = dict.fromkeys(range(run.num_ranks))
        for rank in range(run.num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if run.num_ranks > 1 else {}
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _train(words, variables | own, self.log, self.main, forks=self.forks)
            self.pids[rank] = pid

    def poll(self) -> str | None:
        """Return None while the case runs, an empty string if it passed, else its problem."""
        for rank, status in self.statuses.items():
            if status is None:
                found, ended = os.waitpid(self.pids[rank], os.WNOHANG)
                if found:
                    self.statuses[rank] = os.waitstatus_to_exitcode(ended)
        if time.monotonic() > self.end:
            late = [rank for rank, status in self.statuses.items() if status is None]
            self.kill()
            return f"time out: ranks {late} still ran in run {self.next_run}"
        if self.case.loses_rank:
            return self._poll_after_loss()
        if any(self.statuses.values()):
            # Wait for the other ranks: the first failure has to be found.
            self.end = min(self.end, time.monotonic() + 5)
        if None in self.statuses.values():
            return None
        self.kill()
        failed = {rank: status for rank, status in self.statuses.items() if status}
        if failed:
            return f"exit status by rank: {failed}"
        if self.next_run < len(self.case.runs):
            self.start_run()
            return None
        return ""

    def _poll_after_loss(self) -> str | None:
        if self.lost is None:
            if losses_of(self.text()):
                self.lost = max(self.statuses)
                os.kill(self.pids[self.lost], signal.SIGKILL)
            return None if None in self.statuses.values() else "ended before a rank was killed"
        if None in self.statuses.values():
            return None
        others = [status for rank, status in self.statuses.items() if rank != self.lost]
        if 0 in others:
            return f"ranks ended with {others} although rank {self.lost} was killed"
        is_named = re.search(rf"\brank {self.lost}\b", self.text())
        return "" if is_named else f"no rank named rank {self.lost}, which was killed"

    def text(self) -> str:
        """Return the output of its ranks."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        """End the remaining ranks and their children."""
        for rank, pid in self.pids.items():
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            if self.statuses.get(rank) is None:
                with suppress(ChildProcessError):
                    self.statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _train(
    words: list[str], variables: Mapping[str, str], log: Path, main: Main, *, forks: bool
) -> None:
    """Train as one rank in a fork and exit. Without `forks`, import all modules again."""
    status = 1
    try:
        os.setsid()
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        # Unbuffered: the output is complete when the rank is killed.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(variables)
        if not forks:
            os.chdir(Path(pretrain_gpt.__file__).parent)
            os.execv(sys.executable, [sys.executable, "pretrain_gpt.py", *words])
        torch.set_num_threads(1)
        sys.argv = ["pretrain_gpt.py", *words]
        (main or pretrain_gpt.main)()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forks_can_compute() -> bool:
    """Return whether a fork of this process can use the device.

    Raises:
        SystemExit: there is no accelerator, and LATTICE_DEVICE does not choose the CPU.
    """
    pid = os.fork()
    if pid == 0:
        status = _FAILED
        try:
            where = device.current_device()
            is_wanted = where.type != "cpu" or os.environ.get("LATTICE_DEVICE") == "cpu"
            if is_wanted and torch.ones(1, device=where).item() == 1:
                status = 0
            elif not is_wanted:
                status = _NO_ACCELERATOR
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == _NO_ACCELERATOR:
        raise SystemExit("Error: torch finds no accelerator; --rehearse runs tiny sizes on the CPU")
    return status == 0


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def losses_of(text: str) -> dict[int, float]:
    """Return step -> loss from a log."""
    return {int(step): float(loss) for step, loss in _LOSS.findall(text)}


def run_cases(
    cases: Sequence[Case],
    folder: Path,
    *,
    main: Main = None,
    ranks_at_once: int,
    limit_s: float,
    whole_limit_s: float,
    on_end: Callable[[Outcome], None],
) -> None:
    """Run cases, so that at most `ranks_at_once` ranks run at the same time.

    Args:
        folder: logs and checkpoints; a case without problems removes its files.
        main: the function that a rank runs; default: the main function of `pretrain_gpt.py`.
        limit_s: limit of one case in seconds; a hanging case is killed.
        whole_limit_s: limit of all cases; a case that has not begun has the problem "no time".
        on_end: called with each outcome as soon as the case has ended.
    """
    forks = forks_can_compute()
    if not forks:
        print("forks of this process cannot use the device: each rank imports for itself")
    end = time.monotonic() + whole_limit_s
    waiting, jobs = list(cases), list[_Job]()
    while waiting or jobs:
        free_ranks = ranks_at_once - sum(job.case.num_ranks for job in jobs)
        while waiting and (waiting[0].num_ranks <= free_ranks or not jobs):
            case = waiting.pop(0)
            left = end - time.monotonic()
            if left < 5:
                on_end(Outcome(case, "no time", 0.0, {}, ""))
                continue
            place = folder / case.name.replace(" ", "-")
            jobs.append(_Job(case, place, min(limit_s, left), main, forks=forks))
            free_ranks -= case.num_ranks
        jobs = [job for job in jobs if not _has_ended(job, on_end)]
        time.sleep(0.02)


def _has_ended(job: _Job, on_end: Callable[[Outcome], None]) -> bool:
    problem = job.poll()
    if problem is None:
        return False
    text = job.text()
    seconds = time.monotonic() - job.begin
    on_end(Outcome(job.case, problem, round(seconds, 1), losses_of(text), text))
    if not problem:
        shutil.rmtree(job.folder, ignore_errors=True)
    return True


def first_errors(log: str, most: int = 5) -> Iterator[str]:
    """Yield the lines of a log that most likely name the cause of a failure."""
    found = [line for line in log.splitlines() if re.search(r"Error\b|error:|Rule:|rank \d", line)]
    yield from (line[:300] for line in found[:most])
