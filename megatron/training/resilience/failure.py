"""One final line for a run that failed, the same as JSON, and an exit code by class.

Several ranks usually fail together: one in its own way, the others because it left them. The first
that reaches the rendezvous store reports; the others end quietly, and what it says stands also in
the file that torchrun shows at its end.

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

from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.foundation import standard_output
from megatron.core.foundation.errors import (
    CheckpointError,
    CollectiveMismatchError,
    ConfigError,
    DataError,
    HardwareFaultError,
    MegatronError,
    MissingExtraError,
    NumericsError,
    PeerLostError,
    ReplicaMismatchError,
    ScheduleError,
    SpikeError,
    TopologyError,
    WorkerLostError,
)
from megatron.core.foundation.failure_file import FAILURE_FILE, UNFINISHED, write_failure
from megatron.core.foundation.heartbeat.place import PLACE
from megatron.core.foundation.processes import exhausted_limit, limit_of_memory
from megatron.core.foundation.rendezvous import is_store_host, launcher_is_store_host
from megatron.training.launch import rank_info
from megatron.training.resilience.signals import interrupted_once
from megatron.training.resilience.status import RunStatus
from megatron.training.resilience.watch import end_by, open_watch

EARLIER_FAILURE_FILE = "failure.previous.json"
"""What `FAILURE_FILE` is called once a later run has begun."""
WAIT_S = 3.0
"""How long to wait for the words of other ranks."""


class LauncherLostError(MegatronError):
    """The process that started the ranks is gone."""


CLASSES: tuple[tuple[type[BaseException], str, int], ...] = (
    (NumericsError, "NONFINITE", 14),
    (DataError, "DATA", 11),
    (CheckpointError, "CHECKPOINT", 12),
    (MissingExtraError, "MISSING_LIBRARY", 15),
    (PeerLostError, "PEER_LOST", 17),
    (CollectiveMismatchError, "COLLECTIVE_MISMATCH", 22),
    (TopologyError, "TOPOLOGY", 13),
    (ScheduleError, "SCHEDULE", 13),
    (ConfigError, "CONFIG", 10),
    (KeyboardInterrupt, "INTERRUPTED", 130),
    (MemoryError, "OOM", 16),
    (LauncherLostError, "LAUNCHER_LOST", 18),
    (ReplicaMismatchError, "REPLICA_MISMATCH", 19),
    (HardwareFaultError, "HARDWARE", 23),
    (SpikeError, "SPIKE", 24),
    (WorkerLostError, "WORKER_LOST", 25),
    (standard_output.OutputClosedError, "OUTPUT_CLOSED", 141),
)
"""Exception -> (class in the message, exit code); anything else is CRASH, 1."""

LOST_PEER = ("PEER_LOST", 17)
OUT_OF_MEMORY = ("OOM", 16)
LIMIT = ("LIMIT", 26)
CRASH = ("CRASH", 1)
MISMATCH = ("COLLECTIVE_MISMATCH", 22)

_PEER_TEXTS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed",
    "Timed out waiting", "NCCL communicator was aborted", "recvValue failed",
    "Application timeout caused pair closure", "remote process exited", "Connection refused",
)  # fmt: skip


_NO_MEMORY = re.compile("can(?:no|')t allocate memory|std::bad_alloc", re.IGNORECASE)


def classify(error: BaseException) -> tuple[str, int]:
    """Return (class, exit code) of an error; a joint error has the class that its parts share."""
    parts = error.problems if isinstance(error, MegatronError) else ()
    if parts and len({type(part) for part in parts}) == 1:
        error = parts[0]
    for kind, name, code in CLASSES:
        if isinstance(error, kind):
            return name, code
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(text):
        return OUT_OF_MEMORY
    if exhausted_limit(error) is not None:
        return LIMIT
    is_communication = isinstance(error, (RuntimeError, OSError))
    if is_communication and any(part in text for part in _PEER_TEXTS):
        return LOST_PEER
    return CRASH


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error comes from the silence of another rank."""
    return classify(error) == LOST_PEER


def action_for(error: BaseException, name: str, status: RunStatus) -> str:
    """Say in a few words what to do."""
    parts = error.problems if isinstance(error, MegatronError) else ()
    if len(parts) == 1:
        error = parts[0]
    if isinstance(error, MegatronError) and error.fix:
        return error.fix.splitlines()[0]
    if isinstance(error, MegatronError):
        return "see the message above"
    resume = (
        f"resume with --load {status.save_directory}"
        if status.last_good_checkpoint is not None
        else "start again"
    )
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
    """Return the one line."""
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
    lost = about_peers(error, status)
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
    """Rename failure.json of an earlier run: who looks for the file must not take it for this.

    Remove what runs have left that were killed while they wrote it.
    """
    for unfinished in Path(directory).glob(f"{UNFINISHED}*"):
        unfinished.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.replace(Path(directory) / FAILURE_FILE, Path(directory) / EARLIER_FAILURE_FILE)


def about_peers(error: BaseException, status: RunStatus) -> str:
    """Return what is known of the ranks of this node, if `error` comes from their silence."""
    is_lost = is_lost_peer(error)
    return status.peers.describe() if status.peers is not None and is_lost else ""


def _is_first_to_report(error: BaseException, status: RunStatus, store: Any) -> bool:
    """Ask the store. Where it is gone, all ranks have their own error to tell; of what one rank of
    a node sees the others see, too, one is enough.
    """
    if store is None:
        return True
    try:
        return bool(_ask(lambda: store.add("failure/reports", 1)) == 1)
    except Exception:
        is_seen_by_all = isinstance(error, LauncherLostError) or is_lost_peer(error)
        return status.local_rank == 0 or not is_seen_by_all


def _ask(question: Callable[[], Any]) -> Any:
    """Return the answer of the store, for which torch would wait without end on a dead link.

    Raises:
        TimeoutError: it did not come within WAIT_S.
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


def _said(error: BaseException, status: RunStatus) -> str:
    """Return the message, or the traceback of an unforeseen error."""
    if isinstance(error, KeyboardInterrupt):
        text = f"interrupted while {status.activity}"
    elif isinstance(error, MegatronError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    lost = about_peers(error, status)
    return text + (f"\n{lost}" if lost else "")


_ONE_AT_A_TIME = threading.Lock()
"""The two threads of a rank may fail at the same time."""


def report(error: BaseException, status: RunStatus, store: object) -> int:
    """Write the message of a failed run once, and return this rank's exit code."""
    if status.heart is not None and classify(error) in (CRASH, LOST_PEER, MISMATCH):
        status.heart.ask_watchdog()
    verdict, _ = PLACE.verdict()
    if verdict:  # the watchdog has told why; another thread ends this process
        time.sleep(WAIT_S)
        return verdict
    with _ONE_AT_A_TIME:
        if not status.has_reported:
            status.has_reported = True
            _report(error, status, store)
    return classify(error)[1]


def _report(error: BaseException, status: RunStatus, store: Any) -> None:
    if isinstance(error, LauncherLostError) and launcher_is_store_host():
        # The store is gone with it: asking would only make torch print its stack.
        if status.local_rank == 0:
            _tell(error, status)
        return
    if _is_first_to_report(error, status, store):
        text = _tell(error, status)
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


def _tell(error: BaseException, status: RunStatus) -> str:
    """Print the message and the line, leave the record, and return what was printed."""
    text = f"{_said(error, status)}\n{fatal_line(error, status)}"
    # One call: lines of several ranks would mix.
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
    # The line matters more than the file: a full disk must not hide it.
    with contextlib.suppress(OSError, MegatronError):
        _leave_record(failure_record(error, status), status)
    return text


def _leave_record(record: dict[str, Any], status: RunStatus) -> None:
    """Write failure.json, unless the save directory is that of another run that lives."""
    if status.save_directory is None:
        return
    lock = None
    if not status.has_claimed:
        lock = SaveLock.acquire(status.save_directory, grace_s=0.0)
    write_failure(record, status.save_directory)
    if lock is not None:
        lock.release()


def write_launcher_error_file(text: str) -> None:
    """Tell torchrun, which shows it at its end under "Root Cause"."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.splitlines()[-1], "extraInfo": details}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _let_others_report(status: RunStatus, store: Any) -> None:
    """Keep a store that lives in this process until all ranks have used it, for a while.

    Without it they would report what they know already, with torch's own lines of a lost store.
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
    """Turn an exception of the run into the report and `SystemExit`.

    Of a rank that torchrun started, also the end of torchrun itself, and SIGTERM, which torchrun
    sends when another rank has ended: the thread that waits in a collective hears of neither.
    """
    watch = status.watch = open_watch(
        rank_info.launcher_process(),
        on_orphaned=lambda: _end_orphaned(status, status.store),
        before_end=lambda: _report_lost_peer(status, status.store),
    )
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
            if status.heart is not None:
                status.heart.close()
            if watch is not None:
                watch.close()


def end_by_verdict(code: int, text: str, store: Any) -> None:
    """End this process because the watchdog of the machine says so, and tell the launcher and the
    ranks of other machines why. Called beside the training thread."""
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
        rule="ranks end with their launcher: nobody else would stop or restart them",
        fix="look for what killed torchrun (lack of memory, a scheduler), then start it again",
    )


def _end_orphaned(status: RunStatus, store: Any) -> None:
    """End a rank whose launcher is gone. Called beside the training thread."""
    error = _launcher_lost()
    code = classify(error)[1]
    _within(WAIT_S, lambda: os._exit(code))
    try:
        report(error, status, store)
    finally:
        os._exit(code)


def _report_lost_peer(status: RunStatus, store: Any) -> None:
    """Say why torchrun sends SIGTERM, if a rank of this node was killed."""
    if status.peers is not None and status.peers.any_was_lost():
        error = PeerLostError(
            "another rank of this job was killed.",
            rule="a job ends with any of its ranks",
            fix="see why the rank was killed, then resume",
        )
        _within(WAIT_S, lambda: end_by(signal.SIGTERM))
        report(error, status, store)


def _within(seconds: float, end: Callable[[], None]) -> None:
    """Call `end` after a while: the store answers one thread at a time, and the other may wait."""
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
