"""Faults that a rank of `slow_pretrain.py` commits itself, where the flags say so."""

import ctypes
import signal
import threading
import time
from functools import wraps
from typing import Any

from torch import Tensor

from megatron.core.foundation.flight_recorder import PROGRESS, Field
from megatron.core.transport.transport import (
    GlooTransport,
    MessageTransport,
    NativeTransport,
)
from megatron.core.transport.work import Steps, Work
from megatron.training.hooks.save import SaveCheckpoints
from megatron.training.run.state import TrainState

HOLD = signal.SIGUSR2
"""The signal at which a process takes the interpreter lock for good."""
HOLDERS = ("training-thread", "other-thread")
_MUTEX_BYTES = 64


def hold_interpreter_lock() -> None:
    """Wait for ever in C with Python's interpreter lock, as a library that was called wrongly."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(_MUTEX_BYTES)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # its own: it waits for itself, and no signal ends that


def hold_lock_at_signal(holder: str) -> None:
    """Let a thread of this process hold the lock from `HOLD` on.

    Args:
        holder: the thread that trains, between two of Python's instructions, or another one, while
            the thread that trains may be anywhere.
    """
    if holder == "training-thread":
        signal.signal(HOLD, lambda number, frame: hold_interpreter_lock())
        return
    is_asked = threading.Event()

    def wait_and_hold() -> None:
        is_asked.wait()
        hold_interpreter_lock()

    threading.Thread(target=wait_and_hold, name="holder", daemon=True).start()
    signal.signal(HOLD, lambda number, frame: is_asked.set())


LONG = "for long:"
"""A line begins so that says what takes long from now on."""


def make_saves_long(seconds: float) -> None:
    """Let each save of this process hold the interpreter lock for a while."""
    save = SaveCheckpoints._save

    def long_save(hook: SaveCheckpoints, state: TrainState) -> None:
        print(f"{LONG} saving", flush=True)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        save(hook, state)

    SaveCheckpoints._save = long_save  # type: ignore[method-assign]


_computed_until = 0.0


def compute_more(share: float) -> None:
    """Keep the processor busy for a share of the processor time since the last call."""
    global _computed_until
    now = time.thread_time()
    end = now + share * (now - _computed_until)
    while time.thread_time() < end:
        pass
    _computed_until = time.thread_time()


# Collectives that do not match --------------------------------------------------------------------

KINDS = ("skipped", "other-size", "other-operation")
PLANTED = "planted: "
"""A line begins so that says which call was changed."""
FIRST_STEPS = 3
TRANSPORTS = (NativeTransport, GlooTransport, MessageTransport)
OTHER = {"all_reduce": "all_gather", "all_gather": "all_reduce", "reduce_scatter": "all_reduce"}


class Mismatch:
    """Changes one collective of this rank, a while after its first steps.

    Args:
        kind: one of `KINDS`.
        after: how many collectives are let through.
    """

    def __init__(self, kind: str, after: int) -> None:
        self.kind, self.left = kind, after

    def plant(self) -> None:
        """Replace all methods that start a collective."""
        for owner in TRANSPORTS:
            for name in OTHER.keys() & vars(owner).keys():
                setattr(owner, name, self._replaced(name, vars(owner)[name]))

    def _replaced(self, name: str, method: Any) -> Any:
        @wraps(method)
        def replaced(transport: Any, x: Tensor, *rest: Any, **named: Any) -> Work[Tensor]:
            size = transport.group.size()
            is_in_step = PROGRESS.fields[Field.NUM_STEPS] >= FIRST_STEPS
            can_be = is_in_step and PROGRESS.fields[Field.IS_TRAINING] and x.numel() >= 2 * size > 2
            self.left -= bool(can_be)
            if self.left != -1:
                return method(transport, x, *rest, **named)
            self.left = -2  # once, and what it calls itself is not changed
            return self._changed(name, method, transport, x, named.get("out"))

        return replaced

    def _changed(
        self, name: str, method: Any, transport: Any, x: Tensor, out: Tensor | None
    ) -> Work[Tensor]:
        """Start something else, whose result has the shape that is expected."""
        size = transport.group.size()
        number = PROGRESS.count(transport.group, getattr(transport, "tag", 0)) + 1
        half = x.view(-1)[: x.numel() // 2 // size * size]
        called = {
            "skipped": "nothing",
            "other-size": f"{name} of {half.numel()}",
            "other-operation": f"{OTHER[name]} of {x.numel()}",
        }[self.kind]
        group = transport.group.group_desc
        print(f"{PLANTED}{called} for {name} of {x.numel()}, {number} on {group}", flush=True)
        rows = {"all_gather": len(x) * size, "reduce_scatter": len(x) // size}
        result = x.new_zeros(rows.get(name, len(x)), *x.shape[1:]) if out is None else out
        if self.kind == "skipped":
            return Work.completed(result)
        if self.kind == "other-size":
            wrong = method(transport, half)
        else:
            wrong = getattr(transport, OTHER[name])(x)

        def steps() -> Steps[Tensor]:
            yield from wrong
            return result

        return Work(steps())
