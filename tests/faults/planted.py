"""Faults that a rank of `slow_pretrain.py` commits itself, where the flags say so."""

from __future__ import annotations

import ctypes
import signal
import threading

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
