"""A few threads for work that releases the interpreter lock: hashing and reading blocks.

The pool of `concurrent.futures` refuses work while the interpreter shuts down, when a save in the
background may still be writing.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

MAX_THREADS = 4
"""SHA-256 runs at 1.5 to 2 GB/s per core: four keep up with fast local disks."""


def threads_per_rank() -> int:
    """Return how many threads a rank may use: its share of the cores, at most `MAX_THREADS`."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    num_ranks = int(ranks) if ranks.isascii() and ranks.isdigit() else 1
    return max(1, min(MAX_THREADS, num_cores // max(1, num_ranks)))


class ThreadPool:
    """Runs functions in threads, in the order of their `start`. Use as a context manager."""

    def __init__(self, num_threads: int) -> None:
        self._work: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint-work-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, function: Callable, *arguments: object) -> Future:
        """Call the function in a thread; the future has its result or its exception."""
        future: Future = Future()
        self._work.put((future, function, arguments))
        return future

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all functions, and end the threads."""
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, function, arguments = item
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
