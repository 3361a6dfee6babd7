"""Ranks as threads of one process: the whole protocol without a process group."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any


class ThreadPeers:
    """`ControlGroup` over threads; values are copied, as a process group would."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank = self.global_rank = rank
        self.size = shared.size
        self._shared = shared

    def gather(self, value: Any) -> list[Any] | None:
        values = self._shared.exchange(self.rank, value)
        return values if self.rank == 0 else None

    def scatter(self, values: list[Any] | None) -> Any:
        return self._shared.exchange(self.rank, values)[0][self.rank]

    def broadcast(self, value: Any) -> Any:
        return self._shared.exchange(self.rank, value)[0]


class Shared:
    """The meeting point of the threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        seen = [copy.deepcopy(slot) for slot in self.slots]
        self.barrier.wait()
        return seen


def run_ranks(size: int, body: Callable[[ThreadPeers], Any]) -> list[Any]:
    """Call body(peers) on `size` ranks and return the results, exceptions among them."""
    shared, results = Shared(size), [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = body(ThreadPeers(rank, shared))
        except Exception as error:
            results[rank] = error
            if isinstance(error, threading.BrokenBarrierError):
                shared.barrier.abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def must_succeed(results: list[Any]) -> list[Any]:
    """Return the results, or raise the first exception among them."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
