"""When data-parallel gradient reductions of each model chunk may start.

All backwards but the last of a chunk run inside `no_sync`, so gradients only accumulate. A
GRAD_SYNC step before the last backward leaves `no_sync`: the replication wrapper then reduces
each bucket as its gradients become final, under the rest of that backward. A GRAD_SYNC step after
the last backward starts all reductions of the chunk at once with `grad_sync_func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron.core.pipeline_parallel.instructions import NO_MICROBATCH
from megatron.core.utils import as_list

Callbacks = Callable[..., Any] | Sequence[Callable[..., Any]] | None


def of_chunk(callbacks: Callbacks, chunk: int) -> Callable[..., Any] | None:
    """Return the callback of a chunk from one for all chunks or one per chunk."""
    if callbacks is None:
        return None
    several: Sequence[Callable[..., Any]] = as_list(callbacks)
    return several[chunk if len(several) > 1 else 0]


class GradSync:
    """A context around one training step that opens the chunks' reductions one by one.

    Args:
        chunks: the model chunks of this rank.
        no_sync: factory of the context without reductions; one per chunk or one for all; or None.
        start: called with a chunk's parameters to start their reduction; one per chunk or one for
            all; or None.
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
        """Let the gradients of a chunk be reduced; see `Op.GRAD_SYNC` for `microbatch`."""
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
        """Close a context that several chunks share: the next backward may be another chunk's."""
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
