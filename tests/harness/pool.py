"""A pool of processes that stand for ranks: started once, used by every distributed test.

Forking a process that has already imported torch takes some 20 ms, importing it takes seconds;
so a fork server imports once and workers live on between jobs. A job that fails or hangs costs
the pool: all workers are killed and the next job starts new ones.
"""

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness.worker import ENVIRONMENT, FunctionAddress, Job, Outcome, worker_main

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_WORKERS = 8
PRELOAD = ["tests.harness.preload"]
"""Modules that the fork server imports, in this order; to be changed before the first worker."""
GRACE_S = 3.0
"""How long the other ranks may continue after one has failed: enough to report their own error."""

_context = get_context("forkserver")


class Worker:
    """The parent's end of one worker process."""

    def __init__(self, stack_file: Path, hosts_store: bool) -> None:
        self.stack_file = stack_file
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(
            target=worker_main, args=(theirs, str(stack_file), hosts_store), name="rank-worker"
        )
        with _preload_environment(), _anonymous_main():
            self.process.start()
        theirs.close()

    def dump_stacks(self) -> None:
        """Ask for the Python stacks of this worker; `read_stacks` has them a moment later."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def read_stacks(self) -> str:
        """Return the dumped stacks without the frames and threads of the harness."""
        shown = []
        for thread in self.stack_file.read_text().split("\n\n"):
            lines = thread.splitlines()
            ours = [i for i, line in enumerate(lines) if "tests/harness/worker.py" in line]
            if "_exit_with_parent" not in thread:
                shown.append("\n".join(lines[: ours[0]] if ours else lines))
        return "\n".join(shown)

    def kill(self) -> None:
        """End the process and its children, and wait until they are gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


@contextlib.contextmanager
def _preload_environment() -> Iterator[None]:
    """Start the fork server (if it is not running) with one thread and our modules imported."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    changed = {**ENVIRONMENT, "PYTHONPATH": path}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        _context.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _anonymous_main() -> Iterator[None]:
    """Hide the main program from multiprocessing, which would run it again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class WorkerPool:
    """Up to `MAX_WORKERS` ranks, started when first needed."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._store_port = 0
        self._num_jobs = 0
        self._directory: Path | None = None
        self._owner = os.getpid()

    def run(
        self,
        function: FunctionAddress,
        world_size: int,
        arguments: bytes,
        layout: dict[str, Any],
        timeout_s: float,
    ) -> list[Outcome]:
        """Run `function` on `world_size` ranks and return one outcome each, by rank.

        Returns within `timeout_s` plus a few seconds, whatever the ranks do.
        """
        assert os.getpid() == self._owner, "the pool belongs to the process that made it"
        assert 1 <= world_size <= MAX_WORKERS, f"{world_size=} is not in 1..{MAX_WORKERS}"
        self._grow(world_size)
        self._num_jobs += 1
        workers = self._workers[:world_size]
        try:
            for rank, worker in enumerate(workers):
                job = Job(
                    number=self._num_jobs,
                    function=function,
                    rank=rank,
                    world_size=world_size,
                    arguments=arguments,
                    layout=layout,
                    timeout_s=timeout_s,
                    store_port=self._store_port,
                    warning_filters=list(warnings.filters),
                )
                worker.connection.send_bytes(pickle.dumps(job))
            outcomes = self._collect(workers, timeout_s)
        except BaseException:
            self.shutdown()
            raise
        if any(outcome.failed for outcome in outcomes):
            self.shutdown()
        return outcomes

    def shutdown(self) -> None:
        """Kill all workers and remove the pool's files; a later job starts anew."""
        if os.getpid() != self._owner:
            return
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are alive, by rank."""
        return [worker.process.pid for worker in self._workers]

    def _grow(self, count: int) -> None:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        while len(self._workers) < count:
            index = len(self._workers)
            worker = Worker(self._directory / f"stacks-{index}", hosts_store=index == 0)
            self._workers.append(worker)
            if index == 0:
                self._store_port = pickle.loads(worker.connection.recv_bytes())

    def _collect(self, workers: Sequence[Worker], timeout_s: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        waiting: dict[Connection, int] = {w.connection: r for r, w in enumerate(workers)}
        outcomes: dict[int, Outcome] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = self._receive(workers[rank], rank)
                if outcomes[rank].failed:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting:
            first_failed = any(outcome.failed for outcome in outcomes.values())
            stuck = {rank: workers[rank] for rank in waiting.values()}
            outcomes |= self._describe_stuck(stuck, timeout_s, first_failed)
        return [outcomes[rank] for rank in range(len(workers))]

    def _receive(self, worker: Worker, rank: int) -> Outcome:
        try:
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            worker.process.join()
            code = worker.process.exitcode or 0
            how = f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
            return Outcome(
                self._num_jobs,
                rank,
                error_type="ProcessDied",
                error_message=f"the process of rank {rank} ended without a word ({how})",
                failed_at=time.monotonic(),
            )

    def _describe_stuck(
        self, stuck: dict[int, Worker], timeout_s: float, another_failed: bool
    ) -> dict[int, Outcome]:
        for worker in stuck.values():
            worker.dump_stacks()
        time.sleep(0.3)
        if another_failed:
            why = f"still running {GRACE_S:g} s after another rank had failed"
        else:
            why = f"not finished after {timeout_s:g} s"
        return {
            rank: Outcome(
                self._num_jobs,
                rank,
                error_type="Hang",
                error_message=why,
                trace=f"Hang: {why}; it was here:\n{worker.read_stacks()}",
                failed_at=time.monotonic(),
            )
            for rank, worker in stuck.items()
        }


POOL = WorkerPool()
# Registered after multiprocessing's own exit function, so it runs before that one joins.
atexit.register(POOL.shutdown)
