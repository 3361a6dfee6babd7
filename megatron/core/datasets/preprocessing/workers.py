"""Units through worker processes, and back in the order of the input.

The memory is bounded: few units are in flight at a time. No torch import.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatron.core.datasets.preprocessing.encoder import EncodedUnit
from megatron.core.datasets.preprocessing.units import Unit
from megatron.core.foundation.errors import DataError, MegatronError
from megatron.core.foundation.processes import die_with_parent

Work = Callable[[Unit], EncodedUnit]


def encode_in_order(
    units: Iterable[Unit], work: Work, num_workers: int
) -> Generator[EncodedUnit, None, None]:
    """Encode units on several processes and yield the results in the order of the input.

    Args:
        work: an `Encoder` or the like; what it loaded is shared with forked workers.
        num_workers: processes besides this one; 0 works in this one.
    Raises:
        DataError: a worker died.
    """
    if num_workers == 0:
        for unit in units:
            yield _explained(work, unit)
        return
    # Forked children share the loaded tokenizer; this process has no threads and no torch.
    start = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context(start),
        initializer=_begin_work,
        initargs=(work, os.getpid()),
    )
    under_way: deque[tuple[Unit, Future[EncodedUnit]]] = deque()
    try:
        for unit in units:
            under_way.append((unit, pool.submit(_work_on, unit)))
            # Enough to keep everybody busy while the oldest is slow; not the whole input.
            if len(under_way) > 3 * num_workers:
                yield _result(*under_way.popleft())
        while under_way:
            yield _result(*under_way.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(unit: Unit, future: Future[EncodedUnit]) -> EncodedUnit:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died; the oldest unfinished work was {_place(unit)} of {unit.path}.",
            rule="a worker that is killed (most often for memory) cannot be replaced",
            flags=["--workers"],
            fix="start again with fewer --workers (the run continues where it stopped), or look "
            "for an oversized document there",
        ) from error


_work: Work | None = None
"""The work of this process; set once, when it starts."""


def _begin_work(work: Work, parent: int) -> None:
    global _work
    _work = work
    die_with_parent(parent)
    # Ctrl-C reaches the whole process group; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Lists of numbers form no cycles, and walking through them all again and again costs time.
    gc.collect()
    gc.freeze()
    gc.disable()


def _work_on(unit: Unit) -> EncodedUnit:
    assert _work is not None
    return _explained(_work, unit)


def _explained(work: Work, unit: Unit) -> EncodedUnit:
    """Work on a unit; say where in the input an unforeseen error came from."""
    try:
        return work(unit)
    except (MegatronError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        raise DataError(
            f"{_place(unit)} of {unit.path}: {type(error).__name__}: {error}.",
            rule="whatever the input holds is encoded, or refused by its line",
            flags=["--input", "--tokenizer-backend"],
            fix="look for an odd document there; --tokenizer-backend library may take it",
        ) from error


def _place(unit: Unit) -> str:
    kind = "rows" if unit.rows is not None else "bytes"
    return f"{kind} {unit.start:,} to {unit.end:,}"
