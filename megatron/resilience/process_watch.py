"""Watch the launcher and the other ranks of this machine, in a thread of its own.

Python runs signal handlers in the main thread, between two bytecode instructions, and a rank in a
collective may not execute another instruction for many minutes. This thread acts instead if the
launcher has ended, or if SIGTERM was received and has no other handler.
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
from datetime import timedelta
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.core.foundation.process_identity import ProcessIdentity, stat_of
from megatron.core.foundation.processes import describe_exit, num_killed_for_memory
from megatron.training.launch.rank_info import RankInfo

GRACE_S = 30.0
"""How long a rank without a launcher may take to save, as long as torchrun waits after SIGTERM."""
POLL_MS = 1000
MEETING_TIMEOUT = timedelta(seconds=60)


class Peer:
    """The process of another rank on this machine."""

    def __init__(self, rank: int, identity: ProcessIdentity) -> None:
        self.rank, self.identity = rank, identity
        self._ended_with: int | None = None
        self._has_ended = False

    def look(self) -> str | None:
        """Return the letter of the process state, T or t if it is stopped; None if it has ended.

        The exit code is readable between the end of a process and its removal by the parent.
        """
        try:
            stat = stat_of(self.identity.number)
        except OSError:
            self._has_ended = True
            return None
        if stat.start != self.identity.start:
            self._has_ended = True
        elif stat.has_ended:
            self._has_ended = True
            self._ended_with = os.waitstatus_to_exitcode(stat.wait_status)
        return None if self._has_ended else stat.letter

    def was_lost(self) -> bool:
        """Return whether it failed, in contrast to a normal end or torchrun's SIGTERM."""
        self.look()
        return self._has_ended and self._ended_with not in (None, 0, -signal.SIGTERM)

    def describe(self) -> str | None:
        """Return why the process does not respond; None if it runs."""
        who = f"rank {self.rank} (process {self.identity.number})"
        letter = self.look()
        if letter is not None:
            return f"{who} is stopped (SIGSTOP, or a debugger)" if letter in "Tt" else None
        if self._ended_with is None:
            return f"{who} ended without a report: killed, in most cases for lack of memory"
        return f"{who} {describe_exit(self._ended_with)}"


class LocalPeers:
    """The other ranks of this rank's node."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self._killed_before = num_killed_for_memory()

    @classmethod
    def meet(cls, store: Store, info: RankInfo) -> LocalPeers:
        """Exchange process identities with the other ranks of this node.

        The result has no peers if the launcher does not set the local ranks of a node, or if the
        other ranks are in another namespace.
        """
        first = info.rank - info.local_rank
        others = [r for r in range(first, first + info.local_world_size) if r != info.rank]
        if info.local_rank >= info.local_world_size or not others:
            return cls([])
        try:
            mine = ProcessIdentity.own()
            store.set(f"process/{info.rank}", mine.pack().hex())
            store.wait([f"process/{rank}" for rank in others], MEETING_TIMEOUT)
        except (OSError, RuntimeError):  # no /proc; or the other ranks are ending and will report
            return cls([])
        found = {
            r: ProcessIdentity.unpack(bytes.fromhex(store.get(f"process/{r}").decode()))
            for r in others
        }
        here = (mine.namespace, mine.machine)
        return cls([Peer(r, i) for r, i in found.items() if (i.namespace, i.machine) == here])

    def describe(self) -> str:
        """Return why peers do not respond; "" if all run."""
        found = [text for peer in self.peers if (text := peer.describe()) is not None]
        before, killed = self._killed_before, num_killed_for_memory()
        if before is not None and killed is not None and killed > before:
            found.append(
                f"the kernel has killed {killed - before} process(es) of this control group for"
                " lack of memory since the start"
            )
        return "; ".join(found)


class ProcessWatch:
    """Watch the launcher and the peers given to `follow`, until it is closed.

    Args:
        launcher: process id of the launcher; None watches no launcher.
        on_orphaned: called in the thread when the launcher has ended and nothing will be saved.
        before_end: called in the thread before SIGTERM ends the process.
    """

    def __init__(
        self,
        launcher: int | None,
        on_orphaned: Callable[[], None],
        before_end: Callable[[], None],
    ) -> None:
        self._on_orphaned, self._before_end = on_orphaned, before_end
        self._launcher: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # no such call, or it has ended
            if launcher is not None:
                self._launcher = os.pidfd_open(launcher)
        self._followed: dict[int, Peer] = {}  # process descriptor -> peer
        self._to_follow: queue.SimpleQueue[Sequence[Peer]] = queue.SimpleQueue()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._former_descriptor = -1
        self._closed = threading.Event()
        self._handles_term = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def answer_term(self) -> None:
        """Call `before_end` at SIGTERM from now on, if SIGTERM has no other handler.

        Call this when training begins, not earlier: during long calls into C that hold the GIL, the
        thread would not run.
        """
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._wake_sender.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(
            self._wake_sender.fileno(), warn_on_full_buffer=False
        )
        # A forked child would write its own signals to this descriptor.
        os.register_at_fork(after_in_child=self._forget)
        self._handles_term = True
        signal.signal(signal.SIGTERM, self._ignore)

    def follow(self, peers: Sequence[Peer]) -> None:
        """Read the exit code of each of `peers` as soon as it ends, before its launcher reaps it.

        They replace the peers of earlier calls.
        """
        self._to_follow.put(peers)
        self._wake_sender.send(b"\0")

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        """Do nothing; because of this handler, Python writes SIGTERM to the wake-up descriptor."""

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
        if self._launcher is not None:
            os.close(self._launcher)
            self._launcher = None

    def _run(self) -> None:
        has_ended: set[int] = set()
        while not self._closed.is_set():
            while not self._to_follow.empty():
                has_ended -= self._followed.keys()  # descriptor numbers are reused
                self._replace_followed(self._to_follow.get())
            poll = select.poll()
            for descriptor in (self._wake_receiver.fileno(), self._launcher, *self._followed):
                if descriptor is not None and descriptor not in has_ended:
                    poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(POLL_MS)}
            receiver = self._wake_receiver.fileno()
            has_ended |= ready - {receiver}
            for descriptor in ready & self._followed.keys():
                self._followed[descriptor].look()
            if receiver in ready:
                numbers = self._wake_receiver.recv(64)
                is_ours = signal.getsignal(signal.SIGTERM) == self._ignore
                if is_ours and signal.SIGTERM in numbers and not self._closed.is_set():
                    self._before_end()
                    end_by(signal.SIGTERM)
            if self._launcher in ready and not self._closed.is_set():
                self._end_without_launcher()

    def _replace_followed(self, peers: Sequence[Peer]) -> None:
        for descriptor in self._followed:
            os.close(descriptor)
        self._followed = {}
        for peer in peers:
            with contextlib.suppress(OSError, AttributeError):
                self._followed[peer.identity.open()] = peer

    def _end_without_launcher(self) -> None:
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, self._ignore):
            # The handler of SIGTERM saves and then ends the process.
            os.kill(os.getpid(), signal.SIGTERM)
            if self._closed.wait(GRACE_S):
                return
        self._on_orphaned()


def end_by(number: int) -> None:
    """End this process by a signal, without Python's handler, which needs the main thread."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(0))  # SIG_DFL
    os.kill(os.getpid(), number)
