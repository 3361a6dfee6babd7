"""Launch the ranks of a node and replace ranks that exit, without restarting the others.

    python -m megatron.resilience.inprocess_restart --nproc-per-node 4 pretrain_gpt.py ...

It replaces torchrun, with torchrun's flags --nnodes, --node-rank, --master-addr and --master-
port. If a rank ends, or if the watchdog finds it stuck, a spare process or a new process replaces
it. The other ranks keep their processes and continue after the last step from copies in memory.
With --min-ranks the job continues at once with fewer ranks, and grows as soon as more are idle;
the global batch stays the same. The launcher of node 0 hosts the store of all processes.
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
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.foundation.exit_status import tool
from megatron.core.foundation.failure_file import restart_delay_s
from megatron.core.settings.command_line import read_command_line, value_in
from megatron.core.settings.flags import positional
from megatron.resilience.restart_coordinator import (
    ENDPOINT,
    NODE,
    PROCESS,
    Coordinator,
    ElasticLimits,
    ProcessExit,
)

POLL_S = 0.05
BEAT_S, SILENT_S = 1.0, 8.0
"""Interval of a launcher's heartbeats, and the longest silence before its node counts as lost."""
END_S = 30.0
"""How long ranks may take to save after SIGTERM."""
_FATAL = re.compile(
    r"^(FATAL\[\w+\]).*?( iter=\S+)?( rank=\S+).*?( where=.*?) (?:last_good|action)", re.M
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line."""

    nnodes: int = 1
    """Nodes of the job."""
    node_rank: int = 0
    """Number of this node."""
    nproc_per_node: int = 1
    """Ranks of each node."""
    master_addr: str = "127.0.0.1"
    """Address of node 0."""
    master_port: int = 29500
    """Port of the store on node 0."""
    spares: int = 0
    """Processes of each node that wait, with their imports done, to replace a lost rank."""
    min_ranks: int = 0
    """Continue with fewer ranks, but at least this many; 0 waits until all ranks are available."""
    ranks_per_replica: int = 1
    """The number of ranks is always a multiple of this: the product of the sizes of all axes
    except data parallelism."""
    max_restarts: int = 100
    """Most processes that this launcher starts to replace others."""
    backoff_s: float = 0.0
    """Seconds before a process is started to replace one that failed by itself; each further
    failure of the same class, rank and place waits twice as long, at most 600 s."""
    replacement_delay_s: float = 0.0
    """Seconds before a process is started to replace one that was killed."""
    same_failures: int = 3
    """End the job after this many consecutive failures of the same class, rank and place."""
    command: tuple[str, ...] = positional((), metavar="SCRIPT ...", help="Script and its flags.")


@dataclass
class _Process:
    """A rank, or a spare."""

    name: str
    popen: subprocess.Popen[bytes]
    error_file: Path

    def exit(self) -> ProcessExit:
        """Return the exit status and the failure of the ended process."""
        text = ""
        with contextlib.suppress(OSError, ValueError, KeyError):
            line = json.loads(self.error_file.read_text())["message"]["message"]
            match = _FATAL.search(line)
            text = "".join(part or "" for part in match.groups()) if match else ""
        return ProcessExit(text, self.popen.returncode)


class Launcher:
    """Start and kill the processes of one node, and report their ends to the store."""

    def __init__(self, flags: Flags, folder: Path) -> None:
        self.flags, self.folder = flags, folder
        self.name = f"{flags.node_rank}-{os.getpid()}"
        """Unique among all launchers of the job, earlier ones included."""
        self.processes: list[_Process] = []
        self.due = [0.0] * (flags.nproc_per_node + flags.spares)
        """Start times of the processes to be started."""
        self.store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            flags.master_addr,
            flags.master_port,
            is_master=flags.node_rank == 0,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
        )
        self._num_started = self._num_obeyed = self._num_beats = 0
        self._beaten_at = 0.0
        self._last_exit: tuple[str, int] = ("", 0)

    def step(self, now: float) -> None:
        """Report the processes that have ended; start and kill processes."""
        for process in [p for p in self.processes if p.popen.poll() is not None]:
            self.processes.remove(process)
            self._has_ended(process, now)
        ready, self.due = [d for d in self.due if d <= now], [d for d in self.due if d > now]
        for _ in ready:
            self._start_process()
        if now - self._beaten_at >= BEAT_S:
            self._num_beats, self._beaten_at = self._num_beats + 1, now
            self.store.set(f"beat/{self.name}", str(self._num_beats))
            if self._num_beats == 1:
                number = self.store.add("num_launcher", 1)
                self.store.set(f"launcher/{number}", self.name)
        while self.store.check([f"kill/{self._num_obeyed + 1}"]):
            self._num_obeyed += 1
            wanted = self.store.get(f"kill/{self._num_obeyed}").decode()
            for process in self.processes:
                if process.name == wanted:
                    process.popen.kill()

    def _start_process(self) -> None:
        name = f"{self.name}/{self._num_started}"
        self._num_started += 1
        error_file = self.folder / f"error-{self._num_started}.json"
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
        popen = subprocess.Popen([sys.executable, *self.flags.command], env=environment)
        self.processes.append(_Process(name, popen, error_file))

    def _has_ended(self, process: _Process, now: float) -> None:
        exit, flags = process.exit(), self.flags
        report = {"process": process.name, "text": exit.text, "status": exit.status}
        self.store.set(f"ended/{self.store.add('num_ended', 1)}", json.dumps(report))
        if self._num_started - flags.nproc_per_node - flags.spares >= flags.max_restarts:
            return
        delay = flags.replacement_delay_s
        if exit.text:
            before, times = self._last_exit
            times = times + 1 if before == exit.text else 0
            self._last_exit = (exit.text, times)
            delay = restart_delay_s(flags.backoff_s, times)
        self.due.append(now + delay)

    def end(self, *, grace_s: float) -> None:
        """End the remaining processes."""
        for process in self.processes:
            process.popen.terminate()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(p.popen.poll() is None for p in self.processes):
            time.sleep(POLL_S)
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()


class StoreCoordinator:
    """Connect the coordinator to the store: read reports, write decisions. Runs on node 0."""

    def __init__(self, store: Store, limits: ElasticLimits) -> None:
        self._store, self._coordinator = store, Coordinator(limits)
        self._read: dict[str, int] = {}
        self._joined: dict[str, int] = {}
        self._launchers: dict[str, tuple[str, float]] = {}
        self._processes: set[str] = set()
        self._num_killed = 0

    def _new(self, name: str) -> list[tuple[int, str]]:
        """Return the entries that were appended to a list since the last call, numbered."""
        found = []
        num_counted = self._store.add(f"num_{name}", 0)
        for number in range(self._read.get(name, 0) + 1, num_counted + 1):
            if not self._store.check([f"{name}/{number}"]):
                break  # its writer has counted the entry, but not written it yet
            found.append((number, self._store.get(f"{name}/{number}").decode()))
            self._read[name] = number
        return found

    def step(self, now: float) -> None:
        """Read reports, decide, and write the decision."""
        for _, name in self._new("launcher"):
            self._launchers[name] = ("", now)
        for number, text in self._new("joined"):
            report = json.loads(text)
            self._joined[report["process"]] = number
            self._processes.add(report["process"])
            self._coordinator.has_joined(**report)
            print(f"launcher: {report['process']} waits", flush=True)
        for _, text in self._new("failed"):
            self._coordinator.has_failed(**json.loads(text))
        for _, text in self._new("ended"):
            report = json.loads(text)
            self._ended(report["process"], ProcessExit(report["text"], report["status"]))
        for name, (beat, since) in list(self._launchers.items()):
            newest = self._store.get(f"beat/{name}").decode()
            if newest != beat:
                self._launchers[name] = (newest, now)
            elif now - since > SILENT_S:
                del self._launchers[name]
                for process in sorted(self._processes):
                    if process.partition("/")[0] == name:
                        self._ended(process, ProcessExit("", -signal.SIGKILL))
        self._write_decision(now)

    def _ended(self, process: str, exit: ProcessExit) -> None:
        self._processes.discard(process)
        self._coordinator.has_ended(process, exit)

    def _write_decision(self, now: float) -> None:
        store, decision = self._store, self._coordinator.decide(now)
        if decision.grows is not None:
            store.set(f"change/{decision.grows}", "1")
        if decision.broken is not None:
            store.set(f"broken/{decision.broken}", decision.reason)
            store.set(f"change/{decision.broken}", "1")
        for process in decision.killed:
            self._num_killed += 1
            store.set(f"kill/{self._num_killed}", process)
        for each in decision.assigned:
            store.set(
                f"place/{each.process}/{self._joined[each.process]}", json.dumps(asdict(each))
            )
        if decision.assigned:
            first = decision.assigned[0]
            names = " ".join(each.process for each in decision.assigned)
            print(
                f"launcher: generation {first.attempt} has {first.world_size} ranks: {names}",
                flush=True,
            )
        if decision.status is not None:
            store.set("status", str(decision.status))


def limits_of(flags: Flags) -> ElasticLimits:
    """Return the limits that the flags and the training command's flags set.

    Raises:
        ConfigError: they allow no number of ranks.
    """
    ranks = flags.nnodes * flags.nproc_per_node
    batch = int(value_in(flags.command, "--global-batch-size") or 0)
    limits = ElasticLimits(
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
                rule="--min-ranks is at most the number of ranks, and --node-rank counts from 0",
                flags=["--min-ranks", "--nnodes", "--node-rank", "--nproc-per-node"],
                fix="use --min-ranks 0, which waits for all ranks",
            )
        )
    elif limits.size_for(ranks) != ranks:
        problems.append(
            ConfigError(
                f"{ranks} ranks in replicas of {flags.ranks_per_replica}, and a global batch of"
                f" {limits.global_batch} micro batches.",
                rule="every replica computes the same number of micro batches",
                flags=["--nproc-per-node", "--ranks-per-replica", "--global-batch-size"],
                fix="use a --global-batch-size that the replicas divide",
            )
        )
    raise_together(problems, summary="this launcher")
    return limits


def serve(flags: Flags, folder: Path) -> int:
    """Start and replace processes until the job is over; return its exit status."""
    limits = limits_of(flags)
    if "--inprocess-restart" not in flags.command:
        flags = replace(flags, command=(*flags.command, "--inprocess-restart"))
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda which, _: signals.append(which))
    status, launcher = 1, None
    try:
        launcher = Launcher(flags, folder)
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
    except RuntimeError as error:  # the store has ended with the launcher of node 0
        print(f"launcher: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
    finally:
        if launcher is not None:
            launcher.end(grace_s=END_S if signals else 2.0)
    if flags.node_rank == 0:
        time.sleep(1.0)  # the other launchers read the status
    return status if status >= 0 else 128 - status


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Launch the command; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = _split(words)
    flags = read_command_line(
        Flags, own, prog="python -m megatron.resilience.inprocess_restart", description=__doc__
    )
    with tempfile.TemporaryDirectory(prefix="lattice-launcher-") as folder:
        return serve(replace(flags, command=command), Path(folder))


def _split(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the flags of this launcher, and the script with its flags.

    The script is the first word that is neither a flag nor the value of a flag.
    """
    number = 0
    while number < len(words) and words[number].startswith("--") and words[number] != "--":
        number += 1 if "=" in words[number] or words[number] in ("--help",) else 2
    rest = list(words[number:])
    return list(words[:number]), tuple(rest[1:] if rest[:1] == ["--"] else rest)


if __name__ == "__main__":
    sys.exit(main())
