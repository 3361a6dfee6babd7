"""Report a failed run: one final line, the same fields as JSON, and an exit code by class.

Several ranks usually fail together: one by its own error, the others because this rank is lost. The
first rank that reaches the rendezvous store reports; the others print nothing, and write the same
report to the file that torchrun shows at its end.

    FATAL[DATA] iter=0 rank=0 host=node1 where=building data last_good_ckpt=none action=...
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.foundation import errors, standard_output
from megatron.core.foundation.errors import MegatronError
from megatron.core.foundation.failure_file import FAILURE_FILE, UNFINISHED, write_failure
from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.core.foundation.processes import exhausted_limit, limit_of_memory
from megatron.core.foundation.rendezvous import is_store_host, launcher_is_store_host
from megatron.resilience.process_watch import ProcessWatch, end_by
from megatron.resilience.signals import interrupted_once
from megatron.resilience.status import RunStatus
from megatron.training.launch import rank_info

EARLIER_FAILURE_FILE = "failure.previous.json"
"""Name of the `FAILURE_FILE` of an earlier run."""
WAIT_S = 3.0
"""How long to wait for the store and for other ranks, in seconds."""


class LauncherLostError(MegatronError):
    """The process that started the ranks has ended."""


CLASSES: tuple[tuple[type[BaseException], str, int], ...] = (
    (errors.NumericsError, "NONFINITE", 14),
    (errors.DataError, "DATA", 11),
    (errors.CheckpointError, "CHECKPOINT", 12),
    (errors.MissingExtraError, "MISSING_LIBRARY", 15),
    (errors.PeerLostError, "PEER_LOST", 17),
    (errors.CollectiveMismatchError, "COLLECTIVE_MISMATCH", 22),
    (errors.TopologyError, "TOPOLOGY", 13),
    (errors.ScheduleError, "SCHEDULE", 13),
    (errors.ConfigError, "CONFIG", 10),
    (KeyboardInterrupt, "INTERRUPTED", 130),
    (MemoryError, "OOM", 16),
    (LauncherLostError, "LAUNCHER_LOST", 18),
    (errors.ReplicaMismatchError, "REPLICA_MISMATCH", 19),
    (errors.HardwareFaultError, "HARDWARE", 23),
    (errors.SpikeError, "SPIKE", 24),
    (errors.WorkerLostError, "WORKER_LOST", 25),
    (standard_output.OutputClosedError, "OUTPUT_CLOSED", 141),
)
"""Exception -> (class in the message, exit code); anything else is CRASH, 1."""

LOST_PEER = ("PEER_LOST", 17)
CRASH = ("CRASH", 1)

_PEER_TEXTS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed",
    "Timed out waiting", "NCCL communicator was aborted", "recvValue failed",
    "Application timeout caused pair closure", "remote process exited", "Connection refused",
)  # fmt: skip
_NO_MEMORY = re.compile("can(?:no|')t allocate memory|std::bad_alloc", re.IGNORECASE)


def classify(error: BaseException) -> tuple[str, int]:
    """Return (class, exit code) of an error; a joint error has the common class of its parts."""
    parts = error.problems if isinstance(error, MegatronError) else ()
    if parts and len({type(part) for part in parts}) == 1:
        error = parts[0]
    for kind, name, code in CLASSES:
        if isinstance(error, kind):
            return name, code
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(text):
        return "OOM", 16
    if exhausted_limit(error) is not None:
        return "LIMIT", 26
    is_communication = isinstance(error, (RuntimeError, OSError))
    if is_communication and any(part in text for part in _PEER_TEXTS):
        return LOST_PEER
    return CRASH


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the loss of another rank has caused an error."""
    return classify(error) == LOST_PEER


def action_for(error: BaseException, name: str, status: RunStatus) -> str:
    """Return the recommended action, in a few words."""
    parts = error.problems if isinstance(error, MegatronError) else ()
    if len(parts) == 1:
        error = parts[0]
    if isinstance(error, MegatronError):
        return error.fix.splitlines()[0] if error.fix else "see the message above"
    resume = "start again"
    if status.last_good_checkpoint is not None:
        resume = f"resume with --load {status.save_directory}"
    if name == "LIMIT":
        return f"{exhausted_limit(error)}, then {resume}"
    if name == "OOM" and (limit := limit_of_memory()) is not None:
        return f"{limit}, then {resume}"
    return {
        "OOM": "use a smaller --micro-batch-size, or --recompute-granularity",
        "PEER_LOST": f"look for the rank that ended first, then {resume}",
        "INTERRUPTED": resume,
    }.get(name, f"see the traceback above, then {resume}")


def fatal_line(error: BaseException, status: RunStatus) -> str:
    """Return the FATAL line of an error."""
    name, _ = classify(error)
    last = status.last_good_checkpoint
    fields = {
        "iter": status.iteration,
        "rank": status.rank,
        "host": socket.gethostname(),
        "where": status.activity,
        "last_good_ckpt": "none" if last is None else last,
        "action": action_for(error, name, status),
    }
    if not status.has_begun:
        del fields["iter"], fields["last_good_ckpt"]
    return f"FATAL[{name}] " + " ".join(f"{key}={value}" for key, value in fields.items())


def failure_record(error: BaseException, status: RunStatus) -> dict[str, Any]:
    """Return the content of failure.json."""
    name, code = classify(error)
    found = error.found if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
    lost = _about_peers(error, status)
    return {
        "class": name,
        "exit_code": code,
        "iteration": status.iteration,
        "attempt": status.attempt,
        "rank": status.rank,
        "host": socket.gethostname(),
        "where": status.activity,
        "last_good_ckpt": status.last_good_checkpoint,
        "action": action_for(error, name, status),
        "message": found + (f" ({lost})" if lost else ""),
        "rule": getattr(error, "rule", ""),
        "flags": list(getattr(error, "flags", ())),
        "time": time.time(),
    }


def set_earlier_failure_aside(directory: str) -> None:
    """Rename failure.json of an earlier run, so that no reader mistakes it for this run's file.

    Also remove unfinished files of runs that were killed while they wrote the file.
    """
    for unfinished in Path(directory).glob(f"{UNFINISHED}*"):
        unfinished.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.replace(Path(directory) / FAILURE_FILE, Path(directory) / EARLIER_FAILURE_FILE)


def _about_peers(error: BaseException, status: RunStatus) -> str:
    """Return the state of this node's other ranks if `error` was caused by a lost peer, else ""."""
    return status.peers.describe() if status.peers is not None and is_lost_peer(error) else ""


def _ask(question: Callable[[], Any]) -> Any:
    """Call the store with a timeout; torch itself would wait forever if the link is dead.

    Raises:
        TimeoutError: the store has not answered within WAIT_S.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="ask-store", daemon=True).start()
    try:
        answer, error = answers.get(timeout=WAIT_S)
    except queue.Empty:
        raise TimeoutError(f"the store did not answer within {WAIT_S} s") from None
    if error is not None:
        raise error
    return answer


_ONE_AT_A_TIME = threading.Lock()
"""The two threads of a rank may fail at the same time."""


def report(error: BaseException, status: RunStatus, store: Store) -> int:
    """Report the failure of a run once, and return this rank's exit code."""
    if status.heartbeat is not None and classify(error)[0] in (
        "CRASH", "PEER_LOST", "COLLECTIVE_MISMATCH",
    ):  # fmt: skip
        status.heartbeat.ask_watchdog()
    verdict, _ = PROGRESS.verdict()
    if verdict:  # the watchdog has reported; another thread ends this process
        time.sleep(WAIT_S)
        return verdict
    with _ONE_AT_A_TIME:
        if not status.has_reported:
            status.has_reported = True
            _report(error, status, store)
    return classify(error)[1]


def _report(error: BaseException, status: RunStatus, store: Store) -> None:
    is_orphan = isinstance(error, LauncherLostError)
    if is_orphan and launcher_is_store_host():
        # The store has ended with the launcher; using it would make torch print its stack.
        if status.local_rank == 0:
            _print_report(error, status)
        return
    try:
        is_first = store is None or _ask(lambda: store.add("failure/reports", 1)) == 1
    except Exception:
        # Without a store, all ranks report their own errors, but only one rank of a node reports an
        # error that all ranks of the node have.
        is_first = status.local_rank == 0 or not (is_orphan or is_lost_peer(error))
    if is_first:
        text = _print_report(error, status)
        with contextlib.suppress(Exception):
            reported = f"reported by rank {status.rank}:\n{text}"
            _ask(lambda: store.set("failure/text", reported))
    else:
        text = fatal_line(error, status)
        with contextlib.suppress(Exception):
            _ask(lambda: store.wait(["failure/text"], timedelta(seconds=WAIT_S)))
            text = _ask(lambda: store.get("failure/text")).decode()
    write_launcher_error_file(text)
    _let_others_report(status, store)


def _print_report(error: BaseException, status: RunStatus) -> str:
    """Print the message and the line, write the record, and return the printed text."""
    if isinstance(error, KeyboardInterrupt):
        text = f"interrupted while {status.activity}"
    elif isinstance(error, MegatronError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    lost = _about_peers(error, status)
    text = "\n".join([text, *([lost] if lost else []), fatal_line(error, status)])
    # One call, so that lines of several ranks do not mix.
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
    if status.save_directory is not None:
        # An error while writing the file, such as a full disk, must not hide the printed line.
        with contextlib.suppress(OSError, MegatronError):
            lock = None
            if not status.has_claimed:  # raises if another running job owns the directory
                lock = SaveLock.acquire(status.save_directory, grace_s=0.0)
            write_failure(failure_record(error, status), status.save_directory)
            if lock is not None:
                lock.release()
    return text


def write_launcher_error_file(text: str) -> None:
    """Write the file that torchrun shows at its end under "Root Cause"."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.splitlines()[-1], "extraInfo": details}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _let_others_report(status: RunStatus, store: Store) -> None:
    """Wait until all ranks have used a store that this process hosts, at most WAIT_S.

    Without the store, they would repeat the report and print torch's lines about a lost store.
    """
    with contextlib.suppress(Exception):
        num_ended = _ask(lambda: store.add("failure/ended", 1))
        deadline = time.monotonic() + WAIT_S
        while (
            is_store_host(status.rank)
            and num_ended < rank_info.read_rank_info().world_size
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
            num_ended = _ask(lambda: store.add("failure/ended", 0))


@contextmanager
def failures_reported(status: RunStatus) -> Iterator[None]:
    """Convert an exception in the block to a report and `SystemExit`.

    A rank that torchrun started also reports the end of torchrun, and the SIGTERM that torchrun
    sends when another rank has ended: a training thread in a collective cannot react to either.
    """
    launcher = rank_info.launcher_process()
    is_watched = launcher is not None and threading.current_thread() is threading.main_thread()
    watch = status.watch = None if not is_watched else ProcessWatch(
        launcher,
        on_orphaned=lambda: _end_orphaned(status, status.store),
        before_end=lambda: _report_lost_peer(status, status.store),
    )  # fmt: skip
    with interrupted_once():
        try:
            if rank_info.has_lost_its_launcher():
                raise _launcher_lost()
            yield
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            code = report(standard_output.cause_of(error), status, status.store)
            raise SystemExit(code) from None
        finally:
            if status.heartbeat is not None:
                status.heartbeat.close()
            if watch is not None:
                watch.close()


def end_by_verdict(code: int, text: str, store: Store) -> None:
    """End this process on the watchdog's verdict; write the reason for the launcher and the store.

    Called in another thread than the training thread.
    """
    _within(WAIT_S, lambda: os._exit(code))
    try:
        write_launcher_error_file(text)
        with contextlib.suppress(Exception):
            if _ask(lambda: store.add("failure/reports", 1)) == 1:
                _ask(lambda: store.set("failure/text", text))
    finally:
        os._exit(code)


def _launcher_lost() -> LauncherLostError:
    return LauncherLostError(
        "torchrun, which started this rank, has ended without stopping it.",
        rule="ranks end with their launcher, because nothing else would stop or restart them",
        fix="find out why torchrun was killed (lack of memory, a scheduler), then start it again",
    )


def _end_orphaned(status: RunStatus, store: Store) -> None:
    """End a rank whose launcher has ended. Called in another thread than the training thread."""
    error = _launcher_lost()
    code = classify(error)[1]
    _within(WAIT_S, lambda: os._exit(code))
    try:
        report(error, status, store)
    finally:
        os._exit(code)


def _report_lost_peer(status: RunStatus, store: Store) -> None:
    """Report the cause of torchrun's SIGTERM, if a rank of this node was killed."""
    if status.peers is not None and any(peer.was_lost() for peer in status.peers.peers):
        error = errors.PeerLostError(
            "another rank of this job was killed.",
            rule="a job ends when any of its ranks ends",
            fix="find out why the rank was killed, then resume",
        )
        _within(WAIT_S, lambda: end_by(signal.SIGTERM))
        report(error, status, store)


def _within(seconds: float, end: Callable[[], None]) -> None:
    """Call `end` after a while: the store serves one thread at a time, so a report may block."""
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
