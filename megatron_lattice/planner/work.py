"""Count the operations, Python calls and messages of a rank's step, and time the operations."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.memory_timeline import MemoryTimeline, tensors_in
from megatron.training.setup.fake_device import fake_rank
from megatron.training.setup.traced_memory import routed_share
from megatron.training.setup.traced_rank import ModelScript, RankUnderTest


@dataclass(frozen=True)
class TensorForm:
    """Shape, strides and type of a tensor, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor [...]."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements; elements repeated by a stride of zero count once."""
        sizes = (size for size, step in zip(self.shape, self.stride, strict=True) if step)
        return math.prod(sizes) * self.dtype.itemsize

    def made(self) -> Tensor:
        """Return a tensor [...] of this form: ones, or zeros if the values may be indices."""
        extents = ((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        number = 1 + sum(extents) if all(self.shape) else 0
        is_index = not self.dtype.is_floating_point and self.dtype is not torch.bool
        memory = torch.full((number,), 0 if is_index else 1, dtype=self.dtype)
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Operation:
    """One of torch's operations with its arguments; a tensor argument is stored as its form."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: TreeSpec

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Operation:
        """Return the operation for a call of torch's dispatcher."""
        leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
        forms = (TensorForm.of(x) if isinstance(x, Tensor) else x for x in leaves)
        return cls(function, tuple(forms), tree)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.num_bytes for x in self.leaves if isinstance(x, TensorForm))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments, with newly made tensors."""
        leaves = [x.made() if isinstance(x, TensorForm) else x for x in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return args, kwargs

    def prepared(self) -> Callable[[], Any]:
        """Return a callable that runs the operation on newly made tensors."""
        args, kwargs = self.arguments()
        return lambda: self.function(*args, **kwargs)

    def copies(self) -> Callable[[], Any]:
        """Return a callable that copies the operation's tensors."""
        tensors = [x.made() for x in self.leaves if isinstance(x, TensorForm)]
        return lambda: [tensor.clone() for tensor in tensors]


@dataclass
class WorkOfRank:
    """Work of one rank in one step."""

    operations: Counter[Operation] = field(default_factory=Counter)
    """Number of calls of each operation that is no view."""
    num_calls: int = 0
    """Number of Python function calls."""
    num_messages: int = 0
    """Collectives."""
    message_bytes: int = 0


class WorkCounter(MemoryTimeline):
    """A memory timeline that also counts work inside `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.work = WorkOfRank()
        self._profile: Callable[[FrameType, str, object], None] | None = None

    @contextmanager
    def counting(self) -> Iterator[WorkOfRank]:
        """Count work inside the block, without the calls that compute shapes of fake tensors."""
        self.work, before = WorkOfRank(), sys.getprofile()
        self._profile = self._count_call
        sys.setprofile(self._profile)
        try:
            yield self.work
        finally:
            self._profile = None
            sys.setprofile(before)

    def _count_call(self, frame: FrameType, event: str, _argument: object) -> None:
        is_ours = frame.f_code is WorkCounter.__torch_dispatch__.__code__
        self.work.num_calls += event in ("call", "c_call") and not is_ours

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count it."""
        if self._profile is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        sys.setprofile(None)
        try:
            self._count(func, args, kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            sys.setprofile(self._profile)

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        work = self.work
        if func.namespace == "c10d":
            work.num_messages += 1
            work.message_bytes += sum(t.numel() * t.element_size() for t in tensors_in(args))
        elif not (func.namespace in _NOTES or func.is_view or func in _FREE):
            work.operations[Operation.of(func, args, kwargs)] += 1


_NOTES = {"prim", "profiler"}
"""Namespaces of operations that only query or annotate."""

_FREE = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.lift_fresh.default,
}
"""Operations that move no bytes, although they are not views."""


def work_of_rank(run: ResolvedRun, script: ModelScript, rank: int) -> WorkOfRank:
    """Return the work of one rank in a step after the first, on gloo.

    Args:
        run, script, rank: see `trace_rank`.
    Raises:
        TopologyError: this process is a rank of a run.
    """
    with (
        fake_rank(rank, run.topology.world_size, routed_share=routed_share(run), repeats=True),
        WorkCounter() as counter,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        under_test = RankUnderTest(run, script, counter)
        under_test.step(None)  # allocates the state that later steps reuse
        with counter.counting() as work:
            under_test.step(None)
        return work


def work_of_ranks(run: ResolvedRun, script: ModelScript) -> list[WorkOfRank]:
    """Return `work_of_rank` of all ranks."""
    return [work_of_rank(run, script, rank) for rank in range(run.topology.world_size)]


_ENOUGH_S = 4e-3
"""Seconds to spend on measuring an operation, without its first call."""
_MAX_CALLS = 30
_BEYOND_CACHES = 2**24
"""Number of bytes that exceeds every cache of a core."""


class OperationTimes:
    """Measured seconds of operations.

    They run with torch's number of threads in this process; the fastest of several calls counts.
    """

    def __init__(self) -> None:
        self._found: dict[Operation, float] = {}
        self._seconds_to_read = float("inf")

    def seconds_of_work(self, work: WorkOfRank) -> float:
        """Return the seconds of all operations of a rank, and of reading their operands."""
        return sum(
            (self.seconds(each) + each.num_bytes * self.seconds_to_read) * number
            for each, number in work.operations.items()
        )

    @property
    def seconds_to_read(self) -> float:
        """Seconds to read a byte that is not in the core's cache."""
        if not math.isfinite(self._seconds_to_read):
            self._measure_reading()
        return self._seconds_to_read

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of one call.

        An operation that fails with made-up values (lengths that must have a sum) counts as a copy
        of its tensors.
        """
        if operation not in self._found:
            self._found[operation] = _measured(operation)
        return self._found[operation]

    def measure_again(self) -> None:
        """Measure all operations again and keep the faster times."""
        for operation, least in self._found.items():
            self._found[operation] = min(least, _measured(operation))
        self._measure_reading()

    def _measure_reading(self) -> None:
        long = torch.ones(_BEYOND_CACHES // 4)
        seconds = _least_seconds(long.sum) / _BEYOND_CACHES
        self._seconds_to_read = min(self._seconds_to_read, seconds)


def _measured(operation: Operation) -> float:
    with torch.no_grad():
        try:
            return _least_seconds(operation.prepared())
        except (RuntimeError, ValueError, IndexError):
            return _least_seconds(operation.copies())


def _least_seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    least, until = end - begin, end + _ENOUGH_S
    for _ in range(_MAX_CALLS):
        if end > until:
            break
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
        least = min(least, end - begin)
    return least
