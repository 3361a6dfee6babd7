"""A training job as a user starts it: torchrun or plain Python, watched from outside."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.plan import Target
from tests.faults.processes import (
    MARK,
    Process,
    kill_all,
    listening_sockets,
    processes_of,
    read_process,
)
from tests.harness.machine import ONE_MACHINE
from tests.harness.pool import REPOSITORY

NUM_STEPS, SAVE_INTERVAL, EVALUATION_INTERVAL = 24, 6, 10
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 300"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --mock-data"
    " --tokenizer-type NullTokenizer --lr 1e-2 --lr-decay-style cosine --hidden-dropout 0.1"
    " --attention-dropout 0.1 --log-interval 1 --distributed-backend gloo"
    f" --eval-interval {EVALUATION_INTERVAL} --eval-iters 8 --split 90,8,2"
)
"""Without --num-workers, --train-iters and --save-interval."""
SHARED_ROWS = (
    "--sft --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 12 --calculate-per-token-loss"
    " --hidden-dropout 0 --attention-dropout 0 --global-batch-size 16"
)
"""Conversations in rows that ranks share as they need; with their --data-path."""
SCRIPT = "tests/faults/slow_pretrain.py"
ITERATION = re.compile(r" iteration +(\d+)/ +\d+ \|")
SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+) ")
FATAL = re.compile(r"^FATAL\[(\w+)\].*$", re.MULTILINE)
POLL_S = 0.02
TIMEOUT_SCALE = float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))
"""Multiplies every limit of time, for slow or crowded machines."""


def model_words(flags: str = "") -> list[str]:
    """Return the words of `MODEL` and further flags; a corpus takes the place of synthetic data."""
    words = [*MODEL.split(), *flags.split()]
    return [w for w in words if w != "--mock-data"] if "--data-path" in words else words


def can_have_its_own_shared_memory() -> bool:
    """Return whether a job can get a /dev/shm of its own, which takes root and unshare."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None


def take_signals() -> None:
    """Let processes that are started from now on be interrupted.

    A shell starts what it runs in the background with SIGINT ignored, and that is inherited.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Job:
    """One attempt of a user to train, in a folder of its own.

    Args:
        folder: holds `log`, `tmp` (TMPDIR), `shm` (/dev/shm, where that is possible).
        words: flags of the training script.
        num_ranks: that this launcher starts.
        launcher_flags: flags of the launcher; None starts the script without it.
        launcher: module of the launcher: torchrun's, or that of restarts inside the job.
        prefix: a command that runs what follows it, such as nsenter.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        *,
        num_ranks: int,
        launcher_flags: Sequence[str] | None = ONE_MACHINE,
        launcher: str = "torch.distributed.run",
        prefix: Sequence[str] = (),
        interface: str = "lo",
    ) -> None:
        self.folder, self.num_ranks, self.mark = folder, num_ranks, uuid.uuid4().hex
        self.log = folder / "log"
        self.temporary, self.shared_memory = folder / "tmp", folder / "shm"
        self.temporary.mkdir(parents=True)
        self.shared_memory.mkdir()
        self.sockets: dict[str, str] = {}
        command = [sys.executable, SCRIPT, *words]
        self.is_launched = launcher_flags is not None
        if launcher_flags is not None:
            command[1:1] = ["-m", launcher, *launcher_flags,
                            "--nproc-per-node", str(num_ranks)]  # fmt: skip
        self.started_at = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, *self._own_shared_memory(), *command],
                cwd=REPOSITORY,
                env=self._environment(interface),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def _own_shared_memory(self) -> list[str]:
        if not can_have_its_own_shared_memory():
            return []
        mount = 'mount --bind "$0" /dev/shm && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, str(self.shared_memory)]

    def _environment(self, interface: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        return {
            **kept,
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "LATTICE_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
        }

    # What it prints -------------------------------------------------------------------------

    def text(self) -> str:
        """Return all that it has printed."""
        return self.log.read_text(errors="replace")

    def iterations(self) -> list[int]:
        """Return the finished steps that it has printed."""
        return [int(number) for number in ITERATION.findall(self.text())]

    def saved(self) -> list[int]:
        """Return the iterations that it says it has saved."""
        return [int(number) for number in SAVED.findall(self.text())]

    # Its processes --------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """Return those that live."""
        return processes_of(self.mark)

    def ranks(self) -> dict[int, Process]:
        """Return the living ranks."""
        if not self.is_launched:
            own = read_process(self.pid)
            return {} if own is None else {0: own}
        found = [p for p in self.processes() if p.parent == self.pid and p.rank is not None]
        return {process.rank: process for process in found if process.rank is not None}

    def workers(self, rank: int) -> list[Process]:
        """Return the loader workers of a rank."""
        parent = self.ranks().get(rank)
        if parent is None:
            return []
        others = [p for p in self.processes() if p.parent == parent.pid]
        return [p for p in others if p.command == parent.command]

    def members(self, target: Target) -> list[int]:
        """Return the processes that a signal to the target goes to."""
        if target is Target.ALL:
            return [process.pid for process in self.processes()]
        if target in (Target.LAUNCHER, Target.GROUP):
            return [self.pid]
        if target is Target.WORKER:
            return [process.pid for process in self.workers(0)[:1]]
        rank = self.ranks().get(0 if target is Target.RANK_0 else 1)
        return [] if rank is None else [rank.pid]

    def remember_sockets(self) -> None:
        """Note on which ports it listens now."""
        self.sockets |= listening_sockets(process.pid for process in self.processes())

    # Its end --------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Return whether the user's command has returned."""
        return self.process.poll() is not None

    def wait_until_gone(
        self, within_s: float, may_stay: Callable[[Process], bool] = lambda process: False
    ) -> list[Process]:
        """Wait until no process of it lives; return those that still do after the time."""
        deadline = time.monotonic() + within_s * TIMEOUT_SCALE
        while True:
            is_over, living = self.is_over(), self.processes()
            left = [process for process in living if not may_stay(process)]
            # A process that ends loses its memory, by which it is known, before it has ended.
            is_ending = not is_over and all(process.pid != self.pid for process in living)
            if (not left and not is_ending) or time.monotonic() > deadline:
                return left
            time.sleep(POLL_S)

    def end(self) -> None:
        """Kill what is left of it."""
        while left := self.processes():
            kill_all(left)
            time.sleep(POLL_S)
        self.process.wait()
