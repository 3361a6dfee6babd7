"""Collectives between the ranks of one machine through shared memory.

gloo sends through the loopback network, which copies every byte four times and wakes a thread on
both sides: half a megabyte takes a millisecond or two. Ranks on one machine can read each other's
bytes instead. Each rank owns two slots in a shared mapping; it puts a tensor into a slot, and the
others read it there.

    mapping | processes | put semaphores | wakeup semaphores | rank 0: slot, slot | rank 1: ...

A put semaphore per ordered pair [source, target] of ranks counts the puts of `source`. A rank puts
for the i-th time only after it has read everybody's (i-1)-th tensor, and the others put that one
after reading the (i-2)-th: so slot i mod 2 is free. Beside its process a rank writes for
which operation it puts, and all compare: ranks that call different ones would read nonsense.

A wakeup semaphore per ordered pair wakes a rank that sleeps in `wait_until`; `shared_buffer` uses
it.

The mapping has a name only while the ranks attach: a run that is killed leaves nothing in /dev/shm.
Waiting blocks in the kernel, notices a rank that died, and ends with the timeout of the group.
Where ranks run on several machines or in containers that do not see each other's processes, or the
system lacks a part (process-shared semaphores, process descriptors, space in /dev/shm),
`open_shm_group` returns None and the caller uses its backend. MEGATRON_HOST_EXCHANGE=0 in the
environment does so for all groups.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation.errors import CollectiveMismatchError, PeerLostError
from megatron.core.foundation.flight_recorder import OPERATIONS, PROGRESS
from megatron.core.foundation.process_identity import SIZE, ProcessIdentity
from megatron.core.topology.group import keep_for_group
from megatron.core.transport import backend
from megatron.core.transport.work import Steps, Work

DIRECTORY = Path("/dev/shm")
SLOT_BYTES = 1 << 20
"""Larger tensors travel in pieces of this size."""
HEADER_BYTES = 64
"""Of one semaphore or process: a cache line, so that ranks do not share one."""
_CALLS_AT = -(-SIZE // 8)
"""Which of the words of a process' header is the first of the two that say what was called."""
_CODES = {operation: number << 48 for number, operation in enumerate(OPERATIONS)}
LIVENESS_SECONDS = 1.0
"""How often a waiting rank checks that the others are alive."""
DEFAULT_TIMEOUT_SECONDS = 1800.0
OFF = "MEGATRON_HOST_EXCHANGE"


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class ShmGroup:
    """The shared slots of one group whose ranks run on one machine.

    One object per rank and group, from `open_shm_group`. `put`, `wait_for_puts` and `get` take
    turns, and all ranks call them in the same order with tensors of the same size.
    """

    def __init__(self, memory: mmap.mmap, group: dist.ProcessGroup) -> None:
        rank, size = self.rank, self.size = group.rank(), group.size()
        self.timeout = _timeout(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory = memory
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._semaphores, self._wakeups = (
            [
                [
                    ctypes.c_void_p(base + HEADER_BYTES * (first + source * size + target))
                    for target in range(size)
                ]
                for source in range(size)
            ]
            for first in (size, size + size * size)
        )
        start = _header_bytes(size)
        full = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = [
            [full[start + (2 * r + k) * SLOT_BYTES :][:SLOT_BYTES] for k in range(2)]
            for r in range(size)
        ]
        self._others = [r for r in range(size) if r != rank]
        self._calls = memoryview(memory)[: size * HEADER_BYTES].cast("Q")
        self._processes: dict[int, int] = {}  # group rank -> process descriptor
        self._num_puts = 0
        self._pending: Work[Tensor] | None = None

    def exchange(
        self,
        operation: str,
        x: Tensor,
        consume: Callable[[slice, list[Tensor]], object],
        result: Tensor,
    ) -> Work[Tensor]:
        """Put `x` [...] at once, and read the others' when the work is waited for.

        Tensors above SLOT_BYTES go in pieces, of which the first is put at once. The transfer in
        flight, if any, is finished before.

        Args:
            operation: one of `OPERATIONS`, the same on all ranks.
            consume: gets each piece's range of the flat tensor and what every rank has put there,
                in rank order.
            result: of the work.
        Raises:
            CollectiveMismatchError: another rank called another operation, or with another size.
        """
        if self._pending is not None:
            self._pending.wait()
        call = _CODES[operation] + x.numel()
        self._pending = work = Work(self._steps(call, x, consume, result))
        return work

    def _steps(
        self,
        call: int,
        x: Tensor,
        consume: Callable[[slice, list[Tensor]], object],
        result: Tensor,
    ) -> Steps[Tensor]:
        offset = 0
        first, step = _CALLS_AT, HEADER_BYTES // 8
        for piece in x.view(-1).split(SLOT_BYTES // x.element_size()):
            word = first + self._num_puts % 2
            self._calls[self.rank * step + word] = call
            self.put(piece)
            yield [_OthersPut(self)]
            for peer in self._others:
                theirs = self._calls[peer * step + word]
                if theirs != call:
                    self._pending, self._num_puts = None, self._num_puts + 1
                    raise self._mismatch(peer, call, theirs)
            consume(slice(offset, offset + piece.numel()), self.get(piece))
            offset += piece.numel()
        return result

    def _mismatch(self, peer: int, mine: int, theirs: int) -> CollectiveMismatchError:
        ranks = self._global_ranks
        return CollectiveMismatchError(
            f"rank {ranks[self.rank]} has called {_describe_call(mine)}, rank {ranks[peer]} "
            f"{_describe_call(theirs)}, as number {self._num_puts + 1} of ranks {ranks}.",
            rule="all ranks of a group call the same collectives in the same order, with tensors"
            " of the same size",
            fix="look for a branch that only one of the ranks takes, ahead of this call",
        )

    def put(self, piece: Tensor) -> None:
        """Copy `piece` (contiguous, at most SLOT_BYTES) to this rank's next slot."""
        self._view(self.rank, piece).copy_(piece)
        for peer in self._others:
            self._libc.sem_post(self._semaphores[self.rank][peer])

    def wait_for_puts(self) -> None:
        """Wait until all others have put what `get` returns next.

        Raises:
            PeerLostError: a rank died, or the timeout of the group passed.
        """
        for peer in self._others:
            self._await(peer)

    def get(self, like: Tensor) -> list[Tensor]:
        """Return what each rank has put, in rank order; after `wait_for_puts`.

        The tensors are views of the slots, shaped as `like` [...]: valid until the next `put`.
        """
        views = [self._view(rank, like) for rank in range(self.size)]
        self._num_puts += 1
        return views

    def _view(self, rank: int, like: Tensor) -> Tensor:
        slot = self._slots[rank][self._num_puts % 2]
        return slot[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def wake_peers(self) -> None:
        """Wake the ranks that wait for this one."""
        for peer in self._others:
            self._libc.sem_post(self._wakeups[self.rank][peer])

    def wait_until(self, peer: int, is_reached: Callable[[], bool]) -> None:
        """Sleep until a condition holds that `peer` makes true before it wakes its peers.

        Raises:
            PeerLostError: the rank died, or the timeout of the group passed.
        """
        wakeup = self._wakeups[peer][self.rank]
        while not is_reached():
            # Wakeups that nobody waited for have piled up.
            if self._libc.sem_trywait(wakeup) != 0:
                self._block(wakeup, peer, is_reached)

    def _await(self, peer: int) -> None:
        semaphore = self._semaphores[peer][self.rank]
        if self._libc.sem_trywait(semaphore) != 0:
            self._block(semaphore, peer, lambda: self._libc.sem_trywait(semaphore) == 0)

    def _block(self, semaphore: ctypes.c_void_p, peer: int, is_reached: Callable[[], bool]) -> None:
        """Return when `semaphore` has been taken, or `is_reached` after the end of `peer`."""
        end = time.monotonic() + self.timeout
        PROGRESS.wait_for(self._global_ranks[peer])
        while True:
            wake = time.time() + LIVENESS_SECONDS
            until = _TimeSpec(int(wake), int(wake % 1 * 1e9))
            if self._libc.sem_timedwait(semaphore, ctypes.byref(until)) == 0:
                PROGRESS.wait_for(None)
                return
            if PROGRESS.is_aborted:
                raise _lost(peer, "the ranks give up their process groups")
            # Test again after finding a dead rank: it may have made the condition true before.
            if self._is_dead(peer):
                if is_reached():
                    PROGRESS.wait_for(None)
                    return
                raise _lost(peer, "its process has ended")
            if time.monotonic() > end:
                raise _lost(peer, f"it did not get there within {self.timeout:.0f} s")

    def _is_dead(self, rank: int) -> bool:
        poll = select.poll()  # takes descriptors of any number, which `select.select` does not
        poll.register(self._processes[rank], select.POLLIN)
        return bool(poll.poll(0))

    # Connecting -----------------------------------------------------------------------------

    def _initialize(self) -> bool:
        """First rank only: initialize the semaphores."""
        return all(
            self._libc.sem_init(semaphore, 1, 0) == 0
            for row in (*self._semaphores, *self._wakeups)
            for semaphore in row
        )

    def _sign(self) -> bool:
        """Write which process this rank is; False where the system cannot tell."""
        start = self.rank * HEADER_BYTES
        try:
            self._memory[start : start + SIZE] = ProcessIdentity.own().pack()
        except OSError:
            return False
        return True

    def _watch(self) -> bool:
        """Open descriptors of the other processes; False where that does not work."""
        for peer in self._others:
            start = peer * HEADER_BYTES
            try:
                descriptor = ProcessIdentity.unpack(self._memory[start : start + SIZE]).open()
            except OSError:
                return False
            self._processes[peer] = descriptor
            weakref.finalize(self, os.close, descriptor)
        return True


def open_shm_group(group: dist.ProcessGroup) -> ShmGroup | None:
    """Return the shared slots of `group`, or None where that cannot be; the same on all ranks.

    Communication:
        a broadcast and three all-reduces of a few bytes on `group`, at the first call; the
        answer is remembered as long as the group lives.
    """
    return keep_for_group(group, "shared memory", _connect)


def is_off() -> bool:
    """Return whether the user wants all groups to use their backend."""
    return os.environ.get(OFF, "1") == "0"


def _connect(group: dist.ProcessGroup) -> ShmGroup | None:
    rank, size = group.rank(), group.size()
    wanted = sys.platform == "linux" and hasattr(os, "pidfd_open") and not is_off()
    token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    backend.broadcast(token, group)
    path = DIRECTORY / f"megatron-{token.numpy().tobytes().hex()}"
    shm = None
    try:
        memory = _map(path, size, create=True) if wanted and rank == 0 else None
        if memory is not None:
            shm = ShmGroup(memory, group)
            wanted = shm._initialize()
        if not all_ranks_can(wanted and (rank > 0 or shm is not None), group):
            return None
        if rank > 0:
            memory = _map(path, size, create=False)
            shm = None if memory is None else ShmGroup(memory, group)
        if not all_ranks_can(shm is not None and shm._sign(), group):
            return None
        assert shm is not None
        return shm if all_ranks_can(shm._watch(), group) else None
    finally:
        if rank == 0:
            path.unlink(missing_ok=True)


def _map(path: Path, size: int, *, create: bool) -> mmap.mmap | None:
    """Map the file at `path`, its blocks reserved; None where that does not work."""
    length = _header_bytes(size) + 2 * size * SLOT_BYTES
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, length)
            return mmap.mmap(descriptor, length)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # absent, no space, or truncated
        return None


def _describe_call(code: int) -> str:
    return f"{OPERATIONS[code >> 48]} of {code & ((1 << 48) - 1)} elements"


def _header_bytes(size: int) -> int:
    """Bytes of processes and semaphores, rounded up to pages."""
    return -(-HEADER_BYTES * (size + 2 * size * size) // mmap.PAGESIZE) * mmap.PAGESIZE


def all_ranks_can(mine: bool, group: dist.ProcessGroup) -> bool:
    """Return whether `mine` is true on all ranks of `group`.

    Communication: an all-reduce of a few bytes on `group`.
    """
    return bool(backend.all_reduce(torch.tensor([int(mine)]), group, dist.ReduceOp.MIN).item())


def _timeout(group: dist.ProcessGroup) -> float:
    """Seconds that the group's own backend would wait."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return DEFAULT_TIMEOUT_SECONDS if timeout is None else timeout.total_seconds()


def _lost(rank: int, why: str) -> PeerLostError:
    return PeerLostError(
        f"waiting for rank {rank} of the group failed: {why}.",
        rule="all ranks of a group take part in every exchange",
        flags=["--distributed-timeout-minutes"],
        fix="look at the log of that rank for the first error",
    )


class _OthersPut:
    """The handle of the puts that `wait_for_puts` waits for."""

    def __init__(self, shm: ShmGroup) -> None:
        self.wait = shm.wait_for_puts

    def is_completed(self) -> bool:
        """Return False: to look would take the semaphores."""
        return False
