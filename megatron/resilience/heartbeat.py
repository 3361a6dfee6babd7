"""Run the heartbeat of this rank, and start the watchdog of its machine."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.core.foundation.flight_recorder import PROGRESS, Field
from megatron.core.foundation.process_identity import ProcessIdentity
from megatron.core.pipeline_parallel.instructions import Op
from megatron.training.launch.rank_info import RankInfo

BEAT_S = 0.5
ANSWER_S = 4.0
"""Longer than a watchdog takes if it must wait for stacks."""
_MEETING_TIMEOUT = timedelta(seconds=60)
_MOST_MACHINES = 512
"""With more machines, warnings contain no host names, because each machine would read all names."""


class Heartbeat:
    """Count in the flight recorder until it is closed, and act on the watchdog's verdict.

    Args:
        on_verdict: called in a thread with exit code and reason; it must end the process.
    """

    def __init__(self, on_verdict: Callable[[int, str], None]) -> None:
        self._on_verdict = on_verdict
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        PROGRESS.set_field(Field.CLOSED, 0)
        self._thread.start()

    def ask_watchdog(self) -> None:
        """Wait until the watchdog has compared the operations of the ranks; at most ANSWER_S.

        If ranks were in different collectives, this rank sees only a communication error, or a
        wrong shape later.
        """
        PROGRESS.set_field(Field.ASKS, 1)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if PROGRESS.fields[Field.ANSWERED] or PROGRESS.fields[Field.VERDICT]:
                return
            time.sleep(0.02)

    def close(self) -> None:
        """Stop the heartbeat; the watchdog ignores this rank from now on."""
        PROGRESS.set_field(Field.CLOSED, 1)
        self._closed.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            PROGRESS.set_field(Field.BEATS, PROGRESS.fields[Field.BEATS] + 1)
            code, text = PROGRESS.verdict()
            if code:
                self._on_verdict(code, text)


def start_heartbeat(
    store: Store,
    info: RankInfo,
    *,
    timeout_s: float,
    save_directory: str | None,
    on_verdict: Callable[[int, str], None],
    restarts: bool = False,
) -> Heartbeat | None:
    """Share the flight recorder of this rank; the first rank of the machine starts the watchdog.

    Args:
        store: exchanges the settings of the machine's ranks.
        timeout_s: longest time without progress.
        restarts: end only the stuck ranks, because the other ranks continue without them.
    Returns:
        None if the system has no shared memory files, or the launcher does not set local ranks.
    """
    if timeout_s <= 0 or info.local_rank >= info.local_world_size:
        return None
    stack_signal = int(signal.SIGRTMIN) + 7  # not used otherwise
    try:
        mine = {
            "rank": info.rank,
            "identity": ProcessIdentity.own().pack().hex(),
            "recorder": PROGRESS.share(),
            "stacks": _stacks_at(stack_signal),
            "attempt": PROGRESS.fields[Field.ATTEMPT],
        }
    except (OSError, AttributeError, RuntimeError):
        return None
    store.set(f"heartbeat/{info.rank}", json.dumps(mine))
    if info.local_rank == 0:
        first = info.rank
        store.set(f"host/{first}", socket.gethostname())
        keys = [f"heartbeat/{first + i}" for i in range(info.local_world_size)]
        with contextlib.suppress(RuntimeError, OSError):
            store.wait(keys, _MEETING_TIMEOUT)
            _start_watchdog(
                {
                    "ranks": [json.loads(store.get(key)) for key in keys],
                    "timeout_s": timeout_s,
                    "num_ranks": info.world_size,
                    "restarts": restarts,
                    "stack_signal": stack_signal,
                    "instructions": {int(op): op.name.lower() for op in Op},
                    "save_directory": save_directory,
                    "hosts": _hosts(store, info),
                    "ranks_of_machine": info.local_world_size,
                }
            )
    return Heartbeat(on_verdict)


def _hosts(store: Store, info: RankInfo) -> dict[int, str]:
    """Return first global rank -> host of each machine; {} if a machine is missing."""
    firsts = range(0, info.world_size, info.local_world_size)
    if info.world_size % info.local_world_size or len(firsts) > _MOST_MACHINES:
        return {}
    keys = [f"host/{rank}" for rank in firsts]
    with contextlib.suppress(RuntimeError):
        store.wait(keys, _MEETING_TIMEOUT)
        return {rank: store.get(key).decode() for rank, key in zip(firsts, keys, strict=True)}
    return {}


def _stacks_at(number: int) -> int:
    """Make a signal write the Python stacks of this process to a file; return its descriptor.

    The signal's handler is written in C, so it also works while a thread holds the GIL.
    """
    if PROGRESS.stacks_file is None:
        PROGRESS.stacks_file = os.memfd_create("stacks")
        faulthandler.register(number, file=PROGRESS.stacks_file, all_threads=True, chain=False)
    return PROGRESS.stacks_file


def _start_watchdog(settings: dict[str, object]) -> None:
    """Start the watchdog, a process that outlives this one and needs the standard library only."""
    source = str(Path(__file__).parents[2])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    watchdog = subprocess.Popen(
        [sys.executable, "-S", "-m", "megatron.resilience.watchdog"],
        env={**kept, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert watchdog.stdin is not None
    with watchdog.stdin as pipe:
        pipe.write(json.dumps(settings).encode())
    watchdog.returncode = 0  # prevents the warning that the process was not waited for
