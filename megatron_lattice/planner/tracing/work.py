"""Counts what a rank's step does: operations, calls of Python, messages."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_lattice.planner.tracing.ledger import StorageLedger, tensors_in


@dataclass(frozen=True)
class TensorForm:
    """All of a tensor but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor [...]."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements; what is repeated by a stride of zero counts once."""
        sizes = (size for size, step in zip(self.shape, self.stride, strict=True) if step)
        return math.prod(sizes) * self.dtype.itemsize

    def made(self) -> Tensor:
        """Return a tensor [...] of this form: ones, and zeros where values may be indices."""
        extents = ((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        number = 1 + sum(extents) if all(self.shape) else 0
        is_index = not self.dtype.is_floating_point and self.dtype is not torch.bool
        memory = torch.full((number,), 0 if is_index else 1, dtype=self.dtype)
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Operation:
    """One of torch's operations with its arguments, tensors by their form."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: TreeSpec

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Operation:
        """Return the operation that is called with these."""
        leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
        forms = (TensorForm.of(x) if isinstance(x, Tensor) else x for x in leaves)
        return cls(function, tuple(forms), tree)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.num_bytes for x in self.leaves if isinstance(x, TensorForm))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with tensors of these forms, by position and by name."""
        leaves = [x.made() if isinstance(x, TensorForm) else x for x in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return args, kwargs

    def prepared(self) -> Callable[[], Any]:
        """Return a call of it, with tensors of these forms."""
        args, kwargs = self.arguments()
        return lambda: self.function(*args, **kwargs)

    def copies(self) -> Callable[[], Any]:
        """Return a call that copies its tensors."""
        tensors = [x.made() for x in self.leaves if isinstance(x, TensorForm)]
        return lambda: [tensor.clone() for tensor in tensors]


@dataclass
class WorkOfRank:
    """What one rank does in one step."""

    operations: Counter[Operation] = field(default_factory=Counter)
    """How often each is called that is no view."""
    num_calls: int = 0
    """Of functions, by Python."""
    num_messages: int = 0
    """Collectives."""
    message_bytes: int = 0


class WorkLedger(StorageLedger):
    """A ledger that counts the work as well, inside `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.work = WorkOfRank()
        self._profile: Callable[[FrameType, str, object], None] | None = None

    @contextmanager
    def counting(self) -> Iterator[WorkOfRank]:
        """Inside, work is counted; what shapes take, instead of values, is not."""
        self.work, before = WorkOfRank(), sys.getprofile()
        self._profile = self._count_call
        sys.setprofile(self._profile)
        try:
            yield self.work
        finally:
            self._profile = None
            sys.setprofile(before)

    def _count_call(self, frame: FrameType, event: str, _argument: object) -> None:
        is_ours = frame.f_code is WorkLedger.__torch_dispatch__.__code__
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
"""Namespaces of operations that ask or note something."""

_FREE = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.lift_fresh.default,
}
"""Operations that are no views and move nothing."""
