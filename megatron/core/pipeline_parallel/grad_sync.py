"""Start the data-parallel gradient reductions of each model chunk.

All backwards of a chunk except the last run inside `no_sync`, so gradients only accumulate. A
GRAD_SYNC step before the last backward leaves `no_sync`: the DDP wrapper then reduces each bucket
as soon as its gradients are final, and the reduction overlaps with the rest of that backward. A
GRAD_SYNC step after the last backward starts all reductions of the chunk with `grad_sync_func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.pipeline_parallel.instructions import NO_MICROBATCH
from megatron.core.utils import as_list

Callbacks = Callable[..., Any] | Sequence[Callable[..., Any]] | None


def of_chunk(callbacks: Callbacks, chunk: int) -> Callable[..., Any] | None:
    """Return the callback of a chunk; there is one for all chunks or one per chunk."""
    if callbacks is None:
        return None
    several: Sequence[Callable[..., Any]] = as_list(callbacks)
    return several[chunk if len(several) > 1 else 0]


class GradSync:
    """A context around one training step that enables the reductions of one chunk at a time.

    Args:
        chunks: the model chunks of this rank.
        no_sync: makes the context without reductions; one per chunk, one for all chunks, or None.
        start: starts the reduction of the parameters that it is given; one per chunk, one for all
            chunks, or None.
    """

    def __init__(self, chunks: Sequence[Any], no_sync: Callbacks, start: Callbacks) -> None:
        self._chunks = chunks
        self._start = start
        self._factories = [] if no_sync is None else list(as_list(no_sync))
        self._is_shared = len(self._factories) == 1 and len(chunks) > 1
        self._entered: list[AbstractContextManager[Any] | None] = [None] * len(self._factories)
        self._close_again = False

    def __enter__(self) -> GradSync:
        for index in range(len(self._factories)):
            self._enter(index)
        return self

    def __exit__(self, *exception: object) -> None:
        for index in range(len(self._factories)):
            self._leave(index)

    def open(self, microbatch: int, chunk: int) -> None:
        """Enable the reduction of a chunk's gradients; see `Op.GRAD_SYNC` for `microbatch`."""
        index = 0 if self._is_shared else chunk
        if self._factories:
            self._leave(index)
        if microbatch != NO_MICROBATCH:
            self._close_again = self._is_shared
            return
        start = of_chunk(self._start, chunk)
        if start is not None:
            start(self._chunks[chunk].parameters())
        if self._is_shared:
            self._enter(0)

    def after_backward(self) -> None:
        """Enter a `no_sync` context that chunks share again: other chunks still accumulate."""
        if self._close_again:
            self._close_again = False
            self._enter(0)

    def _enter(self, index: int) -> None:
        context = self._factories[index]()
        context.__enter__()
        self._entered[index] = context

    def _leave(self, index: int) -> None:
        context, self._entered[index] = self._entered[index], None
        if context is not None:
            context.__exit__(None, None, None)
