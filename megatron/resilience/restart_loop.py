"""In-process restart of a rank: join an attempt, abandon it if ranks are lost, join the next one.

The process keeps its imports, its compiled kernels and the copies of the state in its memory. It
builds model, optimizer, groups and loaders anew, for its rank in the next attempt.

Gloo has no call that aborts a collective: the wait of a rank ends only if a connection to another
rank is closed. So each rank closes the connections of the attempt, which ends waits on both sides.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.dist_checkpointing import async_save, save_lock
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.resilience.failure import is_lost_peer
from megatron.resilience.restart_coordinator import ENDPOINT, NODE, PROCESS, RankAssignment
from megatron.resilience.status import RunStatus
from megatron.training.run.state import RanksChange
from megatron.training.setup.distributed import shut_down

LOST_PEER_S, OWN_ERROR_S = 60.0, 3.0
"""How long a rank waits for the message that its attempt is broken: after an error that another
rank has caused, and after any other error."""
_LONG = timedelta(days=30)
_CONNECT_TIMEOUT = timedelta(seconds=120)


class RestartAttempt:
    """One set of ranks that train together, in one of these ranks.

    A thread waits for the end of the attempt, and then aborts all communication of this process
    until the rank has left.
    """

    def __init__(self, assignment: RankAssignment, copies: MemoryCopies) -> None:
        self.assignment, self.copies = assignment, copies
        self._earlier_connections = set(_connected())
        self.store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"generation/{assignment.attempt}", _launcher_store()
        )
        self.reason = ""
        """The reason why the attempt is broken."""
        self.waits_to_grow = False
        """Whether other ranks wait to join after the current step."""
        self.is_broken = threading.Event()
        self._store = _launcher_store()
        self._lock = threading.Lock()
        self._has_left = False
        threading.Thread(target=self._listen, name="membership", daemon=True).start()

    def leave(self) -> None:
        """Stop aborting communication."""
        with self._lock:
            self._has_left = True

    def _listen(self) -> None:
        attempt = self.assignment.attempt
        try:
            if self.assignment.may_grow:
                self._store.wait([f"change/{attempt}"], _LONG)
                self.waits_to_grow = True
            self._store.wait([f"broken/{attempt}"], _LONG)
            self.reason = self._store.get(f"broken/{attempt}").decode()
        except RuntimeError:  # the launcher has ended, and another thread ends this process
            return
        self.is_broken.set()
        while True:
            with self._lock:
                if self._has_left:
                    return
                self._abort()
            time.sleep(0.2)

    def _abort(self) -> None:
        """Close the TCP connections of this attempt, and end waits in shared memory.

        The call is repeated until the training thread has left the attempt, because this thread may
        open more connections. Communicators of NCCL are aborted (not tested on GPUs).
        """
        PROGRESS.is_aborted = True
        for inode, descriptor in _connected().items():
            if inode not in self._earlier_connections:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                    end.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized() and dist.get_backend() != dist.Backend.GLOO:
            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()


def _launcher_store() -> Any:
    """Return a new connection to the launcher's store."""
    host, _, port = os.environ[ENDPOINT].rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=_CONNECT_TIMEOUT)  # type: ignore[attr-defined]


def _connected() -> dict[str, int]:
    """Return inode -> descriptor of the connected TCP sockets of this process."""
    connected: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "01":  # established
                    connected.add(fields[9])
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]")
            if inode in connected:
                found[inode] = int(name)
    return found


def run_with_restarts(
    status: RunStatus,
    run: Callable[[RestartAttempt | None], None],
    *,
    wants_restarts: Callable[[], bool],
) -> None:
    """Call `run` in one attempt after another, until it returns or has an error of its own.

    If another launcher, or no launcher, started this process, `run` is called once, with None.

    Args:
        wants_restarts: returns whether the settings enable restarts.
    Raises:
        ConfigError: restarts are enabled, but the launcher does not support them.
    """
    if ENDPOINT not in os.environ:
        if wants_restarts():
            raise ConfigError(
                "--inprocess-restart under a launcher that ends all ranks when one fails.",
                rule="only the launcher of in-process restart replaces lost processes",
                flags=["--inprocess-restart"],
                fix="start with `python -m megatron.resilience.inprocess_restart` instead of"
                " torchrun, or use torchrun --max-restarts with --load",
            )
        run(None)
        return
    store, copies = _launcher_store(), MemoryCopies()
    while True:
        status.activity = "waiting for the other ranks"
        assignment = _join(store)
        PROGRESS.reset()
        status.reset(assignment.rank, assignment.local_rank, assignment.attempt)
        attempt = RestartAttempt(assignment, copies)
        try:
            run(attempt)
            attempt.leave()
            return
        except (SystemExit, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            if not _is_over(error, store, attempt):
                raise
            attempt.leave()
            if assignment.local_rank == 0:
                why = attempt.reason or str(error)
                sys.stderr.write(
                    f"RESTART iter={status.iteration} generation={assignment.attempt}: {why}\n"
                )
                sys.stderr.flush()
            traceback.clear_frames(error.__traceback__)
        _tear_down(status)


def _join(store: Any) -> RankAssignment:
    """Wait for a rank in the next attempt, and set the environment variables of that rank."""
    process = os.environ[PROCESS]
    number = store.add("num_joined", 1)
    store.set(f"joined/{number}", json.dumps({"process": process, "node": int(os.environ[NODE])}))
    key = f"place/{process}/{number}"
    store.wait([key], _LONG)
    assignment = RankAssignment(**json.loads(store.get(key)))
    os.environ.update(
        RANK=str(assignment.rank),
        LOCAL_RANK=str(assignment.local_rank),
        WORLD_SIZE=str(assignment.world_size),
        LOCAL_WORLD_SIZE=str(assignment.local_world_size),
        GROUP_RANK=str(assignment.node),
        TORCHELASTIC_RESTART_COUNT=str(assignment.attempt),
    )
    return assignment


def _is_over(error: BaseException, store: Any, attempt: RestartAttempt) -> bool:
    """Return whether an error means only that the attempt is over."""
    if isinstance(error, RanksChange):
        return True
    seconds, assignment = OWN_ERROR_S, attempt.assignment
    if is_lost_peer(error):
        number = store.add("num_failed", 1)
        failed = {"process": assignment.process, "attempt": assignment.attempt}
        store.set(f"failed/{number}", json.dumps(failed))
        seconds = LOST_PEER_S
    return attempt.is_broken.wait(seconds)


def _tear_down(status: RunStatus) -> None:
    """Destroy process groups and state of an attempt, without waiting for other ranks."""
    if status.heartbeat is not None:
        status.heartbeat.close()
        status.heartbeat = None
    async_save.abandon()
    save_lock.release_all()
    with contextlib.suppress(Exception):
        shut_down()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
