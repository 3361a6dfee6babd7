"""Start the ranks of a node, and others in place of those that end, while the rest goes on.

    python -m megatron.training.inprocess.run --nproc-per-node 4 pretrain_gpt.py ...

In place of torchrun, with its flags --nnodes, --node-rank, --master-addr and --master-port. A rank
that ends, or that the watchdog finds stuck, is replaced by a spare process, or by a new one; the
others keep their processes and continue after the last step of which there are copies in memory.
With --min-ranks fewer ranks continue at once, and more as soon as they are there; the global batch
stays. The launcher of node 0 keeps the store in which all meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.foundation.exit_status import tool
from megatron.core.foundation.failure_file import restart_delay_s
from megatron.core.settings.command_line import read_command_line, value_in
from megatron.core.settings.flags import positional
from megatron.training.inprocess.coordinator import Cause, Coordinator, Decision, Limits, lost
from megatron.training.inprocess.membership import ENDPOINT, NODE, PROCESS

POLL_S = 0.05
BEAT_S, SILENT_S = 1.0, 8.0
"""How often a launcher shows that it lives, and after which silence its node is taken for lost."""
END_S = 30.0
"""How long ranks may take to save after SIGTERM."""
_FATAL = re.compile(
    r"^(FATAL\[\w+\]).*?( iter=\S+)?( rank=\S+).*?( where=.*?) (?:last_good|action)", re.M
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What is started."""

    nnodes: int = 1
    """Nodes of the job."""
    node_rank: int = 0
    """Number of this one."""
    nproc_per_node: int = 1
    """Ranks of each node."""
    master_addr: str = "127.0.0.1"
    """Address of node 0."""
    master_port: int = 29500
    """Port there of the store."""
    spares: int = 0
    """Processes of each node that wait with their imports done, for the rank that is lost."""
    min_ranks: int = 0
    """Continue with fewer ranks, but so many; 0: only with all of them."""
    ranks_per_replica: int = 1
    """Ranks come and go by so many: the product of the sizes of all axes but data parallelism."""
    max_restarts: int = 100
    """Processes that this launcher starts in place of others."""
    backoff_s: float = 0.0
    """Seconds before a process is started in place of one that failed by itself; each further
    failure of the same class, rank and place waits twice as long, at most 600 s."""
    replacement_delay_s: float = 0.0
    """Seconds before a process is started in place of one that was killed."""
    same_failures: int = 3
    """End after so many failures in a row of the same class, rank and place."""
    command: tuple[str, ...] = positional((), metavar="SCRIPT ...", help="Script and its flags.")


@dataclass
class _Process:
    """A rank, or a spare."""

    name: str
    popen: subprocess.Popen[bytes]
    error_file: Path

    def cause(self) -> Cause:
        """Return why it has ended."""
        text = ""
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(self.error_file.read_text())["message"]["message"]
            match = _FATAL.search(said)
            text = "".join(part or "" for part in match.groups()) if match else ""
        return Cause(text, self.popen.returncode)


@dataclass
class Launcher:
    """The launcher of one node."""

    flags: Flags
    words: tuple[str, ...]
    folder: Path
    store: Any = None
    processes: list[_Process] = field(default_factory=list)
    num_started: int = 0
    due: list[float] = field(default_factory=list)
    """When to start which number of processes."""
    stops: bool = False
    _last_cause: tuple[str, int] = ("", 0)
    _num_obeyed: int = 0
    _beat: tuple[int, float] = (0, 0.0)

    @property
    def name(self) -> str:
        """This launcher, among all that were ever started for the job."""
        return f"{self.flags.node_rank}-{os.getpid()}"

    def start(self) -> None:
        """Connect to the store, and have the first processes started."""
        flags = self.flags
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            flags.master_addr,
            flags.master_port,
            is_master=flags.node_rank == 0,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
        )
        self.due = [0.0] * (flags.nproc_per_node + flags.spares)

    def step(self, now: float) -> None:
        """Note who has ended, and start and kill what has to be."""
        for process in [p for p in self.processes if p.popen.poll() is not None]:
            self.processes.remove(process)
            self._has_ended(process, now)
        ready, self.due = [d for d in self.due if d <= now], [d for d in self.due if d > now]
        for _ in ready:
            self._start_process()
        if now - self._beat[1] >= BEAT_S:
            self._beat = (self._beat[0] + 1, now)
            self.store.set(f"beat/{self.name}", str(self._beat[0]))
            if self._beat[0] == 1:
                number = self.store.add("num_launchers", 1)
                self.store.set(f"launcher/{number}", self.name)
        while self.store.check([f"kill/{self._num_obeyed + 1}"]):
            self._num_obeyed += 1
            wanted = self.store.get(f"kill/{self._num_obeyed}").decode()
            for process in self.processes:
                if process.name == wanted:
                    process.popen.kill()

    def _start_process(self) -> None:
        name = f"{self.name}/{self.num_started}"
        self.num_started += 1
        error_file = self.folder / f"error-{self.num_started}.json"
        environment = {
            **os.environ,
            ENDPOINT: f"{self.flags.master_addr}:{self.flags.master_port}",
            PROCESS: name,
            NODE: str(self.flags.node_rank),
            "MASTER_ADDR": self.flags.master_addr,
            "MASTER_PORT": str(self.flags.master_port),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        popen = subprocess.Popen([sys.executable, *self.words], env=environment)
        self.processes.append(_Process(name, popen, error_file))

    def _has_ended(self, process: _Process, now: float) -> None:
        cause = process.cause()
        said = {"process": process.name, "text": cause.text, "status": cause.status}
        self.store.set(f"ended/{self.store.add('num_ended', 1)}", json.dumps(said))
        if self.num_started - self.flags.nproc_per_node - self.flags.spares >= (
            self.flags.max_restarts
        ):
            return
        delay = self.flags.replacement_delay_s
        if cause.text:
            before, times = self._last_cause
            times = times + 1 if before == cause.text else 0
            self._last_cause = (cause.text, times)
            delay = restart_delay_s(self.flags.backoff_s, times)
        self.due.append(now + delay)

    def end(self, *, grace_s: float) -> None:
        """End what is left of the processes."""
        for process in self.processes:
            process.popen.terminate()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(p.popen.poll() is None for p in self.processes):
            time.sleep(POLL_S)
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()


class StoreCoordinator:
    """On node 0: tells the coordinator what the store says, and the store what it decides."""

    def __init__(self, store: Any, limits: Limits) -> None:
        self._store, self._coordinator = store, Coordinator(limits)
        self._read: dict[str, int] = {}
        self._joined: dict[str, int] = {}
        self._launchers: dict[str, tuple[str, float]] = {}
        self._processes: set[str] = set()
        self._num_killed = 0

    def _new(self, name: str, counter: str) -> list[tuple[int, Any]]:
        """Return what has been added to a list since the last look, with its numbers."""
        found = []
        for number in range(self._read.get(name, 0) + 1, self._store.add(counter, 0) + 1):
            if not self._store.check([f"{name}/{number}"]):
                break  # counted, not yet said
            found.append((number, self._store.get(f"{name}/{number}").decode()))
            self._read[name] = number
        return found

    def step(self, now: float) -> int | None:
        """Look, decide, tell; return the exit status once the job is over."""
        for _, name in self._new("launcher", "num_launchers"):
            self._launchers[name] = ("", now)
        for number, text in self._new("joined", "num_joined"):
            said = json.loads(text)
            self._joined[said["process"]] = number
            self._processes.add(said["process"])
            self._coordinator.has_joined(**said)
            print(f"launcher: {said['process']} waits", flush=True)
        for _, text in self._new("failed", "num_failed"):
            self._coordinator.has_failed(**json.loads(text))
        for _, text in self._new("ended", "num_ended"):
            said = json.loads(text)
            self._ended(said["process"], Cause(said["text"], said["status"]))
        for name, (beat, since) in list(self._launchers.items()):
            newest = self._store.get(f"beat/{name}").decode()
            if newest != beat:
                self._launchers[name] = (newest, now)
            elif now - since > SILENT_S:
                del self._launchers[name]
                for process in lost(sorted(self._processes), name):
                    self._ended(process, Cause("", -signal.SIGKILL))
        decision = self._coordinator.decide(now)
        self._tell(decision)
        return decision.status

    def _ended(self, process: str, cause: Cause) -> None:
        self._processes.discard(process)
        self._coordinator.has_ended(process, cause)

    def _tell(self, decision: Decision) -> None:
        store = self._store
        if decision.grows is not None:
            store.set(f"change/{decision.grows}", "1")
        if decision.broken is not None:
            store.set(f"broken/{decision.broken}", decision.reason)
            store.set(f"change/{decision.broken}", "1")
        for process in decision.killed:
            self._num_killed += 1
            store.set(f"kill/{self._num_killed}", process)
        for place in decision.assigned:
            key = f"place/{place.process}/{self._joined[place.process]}"
            store.set(key, json.dumps(asdict(place)))
        if decision.assigned:
            first = decision.assigned[0]
            names = " ".join(place.process for place in decision.assigned)
            print(
                f"launcher: generation {first.generation} has {first.world_size} ranks: {names}",
                flush=True,
            )
        if decision.status is not None:
            store.set("status", str(decision.status))


def limits_of(flags: Flags) -> Limits:
    """Return what the flags, and those of the training command, allow.

    Raises:
        ConfigError: no number of ranks would be allowed.
    """
    ranks = flags.nnodes * flags.nproc_per_node
    batch = int(value_in(flags.command, "--global-batch-size") or 0)
    limits = Limits(
        max_ranks=ranks,
        min_ranks=flags.min_ranks or ranks,
        ranks_per_replica=flags.ranks_per_replica,
        global_batch=batch // int(value_in(flags.command, "--micro-batch-size") or 1),
        max_same_failures=flags.same_failures,
    )
    problems: list[MegatronError] = []
    if not flags.command:
        problems.append(
            ConfigError(
                "there is no script.",
                rule="a launcher starts a script",
                flags=["SCRIPT"],
                fix="add for example pretrain_gpt.py and its flags",
            )
        )
    if flags.min_ranks > ranks or not 0 <= flags.node_rank < flags.nnodes or ranks < 1:
        problems.append(
            ConfigError(
                f"--min-ranks {flags.min_ranks} and --node-rank {flags.node_rank} of {flags.nnodes}"
                f" nodes of {flags.nproc_per_node} ranks.",
                rule="there are not fewer ranks than at least must train, and nodes count from 0",
                flags=["--min-ranks", "--nnodes", "--node-rank", "--nproc-per-node"],
                fix="use --min-ranks 0, which waits for all ranks",
            )
        )
    elif limits.size_for(ranks) != ranks:
        problems.append(
            ConfigError(
                f"{ranks} ranks in replicas of {flags.ranks_per_replica}, and a global batch of"
                f" {limits.global_batch} micro batches.",
                rule="every replica computes as many micro batches",
                flags=["--nproc-per-node", "--ranks-per-replica", "--global-batch-size"],
                fix="use a --global-batch-size that the replicas divide",
            )
        )
    raise_together(problems, summary="this launcher")
    return limits


def serve(flags: Flags, folder: Path) -> int:
    """Start and replace processes until the job is over; return its exit status."""
    limits = limits_of(flags)
    words = flags.command
    if "--inprocess-restart" not in words:
        words = (*words, "--inprocess-restart")
    launcher = Launcher(flags, words, folder)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda which, _: signals.append(which))
    status = 1
    try:
        launcher.start()
        coordinator = StoreCoordinator(launcher.store, limits) if flags.node_rank == 0 else None
        while True:
            now = time.monotonic()
            launcher.step(now)
            if coordinator is not None:
                coordinator.step(now)
            if launcher.store.check(["status"]):
                status = int(launcher.store.get("status"))
                break
            if signals:
                status = 128 + signals[0]
                break
            if not launcher.processes and not launcher.due:
                print("launcher: no restarts are left", file=sys.stderr, flush=True)
                break
            time.sleep(POLL_S)
    except RuntimeError as error:  # the store is gone with the launcher of node 0
        print(f"launcher: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
    finally:
        launcher.end(grace_s=END_S if signals else 2.0)
    if flags.node_rank == 0:
        time.sleep(1.0)  # the others read the status
    return status if status >= 0 else 128 - status


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Launch what the command line says; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = _split(words)
    flags = read_command_line(
        Flags, own, prog="python -m megatron.training.inprocess.run", description=__doc__
    )
    with tempfile.TemporaryDirectory(prefix="lattice-launcher-") as folder:
        return serve(replace(flags, command=command), Path(folder))


def _split(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return this launcher's own words, and the script with its flags: all from the first word on
    that is no flag and no value of one."""
    number = 0
    while number < len(words) and words[number].startswith("--") and words[number] != "--":
        number += 1 if "=" in words[number] or words[number] in ("--help",) else 2
    rest = list(words[number:])
    return list(words[:number]), tuple(rest[1:] if rest[:1] == ["--"] else rest)


if __name__ == "__main__":
    sys.exit(main())
