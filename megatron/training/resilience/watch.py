"""A thread that answers what the training thread cannot while it waits for other ranks.

Two things: the launcher is gone, and SIGTERM where nobody handles it. Python runs handlers in the
training thread, between two of its instructions, and a rank that waits in a collective may not
come to the next one for many minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from megatron.training.resilience.peers import Peer

GRACE_S = 30.0
"""How long a rank without a launcher may take to save: what torchrun gives after SIGTERM."""
POLL_MS = 1000


class Watch:
    """Watches over this process as long as it is open.

    Args:
        launcher: process id of the launcher; None watches nothing.
        on_orphaned: called in the thread when the launcher is gone, and nothing will be saved.
        before_end: called in the thread before SIGTERM ends the process.
    """

    def __init__(
        self,
        launcher: int | None,
        on_orphaned: Callable[[], None],
        before_end: Callable[[], None],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self._launcher = launcher
        self._on_orphaned = on_orphaned
        self._before_end = before_end
        self._grace_s = grace_s
        self._descriptor: int | None = None
        self._followed: dict[int, Peer] = {}  # process descriptor -> whose
        self._to_follow: queue.SimpleQueue[Sequence[Peer]] = queue.SimpleQueue()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._former_descriptor = -1
        self._closed = threading.Event()
        self._handles_term = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def open(self) -> Watch:
        """Start watching. Call it in the main thread."""
        with contextlib.suppress(OSError, AttributeError):  # no such call, or gone already
            if self._launcher is not None:
                self._descriptor = os.pidfd_open(self._launcher)
        self._thread.start()
        return self

    def answer_term(self) -> None:
        """Call `before_end` at SIGTERM from now on, if nobody else handles it.

        Not before training: while a long call into C lasts, the thread would not get to answer.
        """
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._wake_sender.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(
            self._wake_sender.fileno(), warn_on_full_buffer=False
        )
        # A forked child would write here for its own signals.
        os.register_at_fork(after_in_child=self._forget)
        self._handles_term = True
        signal.signal(signal.SIGTERM, self._ignore)

    def follow(self, peers: Sequence[Peer]) -> None:
        """Look at each of `peers` as soon as it ends: its launcher removes what tells how.

        They take the place of those that were followed before.
        """
        self._to_follow.put(peers)
        self._wake_sender.send(b"\0")

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        """The thread answers; this only makes Python tell it."""

    def _forget(self) -> None:
        if not self._closed.is_set():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._ignore:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._handles_term:
            signal.set_wakeup_fd(self._former_descriptor)
            if signal.getsignal(signal.SIGTERM) == self._ignore:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._wake_sender.close()
        self._thread.join(2.0)
        self._wake_receiver.close()
        self._replace_followed(())
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _run(self) -> None:
        has_ended: set[int] = set()
        while not self._closed.is_set():
            while not self._to_follow.empty():
                has_ended -= self._followed.keys()  # a number is used again
                self._replace_followed(self._to_follow.get())
            poll = select.poll()
            for descriptor in (self._wake_receiver.fileno(), self._descriptor, *self._followed):
                if descriptor is not None and descriptor not in has_ended:
                    poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(POLL_MS)}
            receiver = self._wake_receiver.fileno()
            has_ended |= ready - {receiver}
            for descriptor in ready & self._followed.keys():
                self._followed[descriptor].look()
            if receiver in ready:
                self._answer(self._wake_receiver.recv(64))
            if self._descriptor in ready:
                self._answer_the_end_of_the_launcher()

    def _replace_followed(self, peers: Sequence[Peer]) -> None:
        for descriptor in self._followed:
            os.close(descriptor)
        self._followed = {}
        for peer in peers:
            with contextlib.suppress(OSError, AttributeError):
                self._followed[peer.identity.open()] = peer

    def _answer(self, numbers: bytes) -> None:
        """Answer the signals whose `numbers` came."""
        is_ours = signal.getsignal(signal.SIGTERM) == self._ignore
        if is_ours and signal.SIGTERM in numbers and not self._closed.is_set():
            self._before_end()
            end_by(signal.SIGTERM)

    def _answer_the_end_of_the_launcher(self) -> None:
        if self._closed.is_set():
            return
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, self._ignore):
            # Somebody saves on SIGTERM, and ends the process when that is done.
            os.kill(os.getpid(), signal.SIGTERM)
            if self._closed.wait(self._grace_s):
                return
        self._on_orphaned()


def end_by(number: int) -> None:
    """End this process by a signal whose handler Python would run in the main thread only."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(0))  # SIG_DFL
    os.kill(os.getpid(), number)


def open_watch(
    launcher: int | None, on_orphaned: Callable[[], None], before_end: Callable[[], None]
) -> Watch | None:
    """Return an open watch of a rank that torchrun started; of another, nothing is watched."""
    is_main = threading.current_thread() is threading.main_thread()
    if launcher is None or not is_main:
        return None
    return Watch(launcher, on_orphaned, before_end).open()
