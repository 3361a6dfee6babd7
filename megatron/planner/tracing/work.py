"""Counts what the operations of a rank's step do: products, bytes, launches, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from megatron.planner.tracing.ledger import StorageLedger, tensors_in


@dataclass
class WorkOfRank:
    """What one rank does in one step."""

    flops: float = 0.0
    """Of matrix products."""
    num_bytes: float = 0.0
    """Operands and results of all operations that are no views."""
    num_operations: float = 0.0
    num_messages: float = 0.0
    """Collectives."""
    message_bytes: float = 0.0


class WorkLedger(StorageLedger):
    """A ledger that counts the work as well."""

    def __init__(self) -> None:
        super().__init__()
        self.work = WorkOfRank()

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count what it does."""
        result = super().__torch_dispatch__(func, _types, args, kwargs)
        if func.namespace == "prim":
            return result
        work, results = self.work, tensors_in(result)
        if func.namespace == "c10d":
            work.num_messages += 1
            work.message_bytes += sum(t.numel() * t.element_size() for t in tensors_in(args))
            return result
        if func.is_view or func in _FREE:
            return result
        work.num_operations += 1
        # What works in place is counted as what does not: addmm_ as addmm.
        packet = getattr(torch.ops.aten, func.overloadpacket.__name__.rstrip("_"), None)
        if func.namespace == "aten" and packet in flop_registry:
            work.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        touched: dict[int, Tensor] = {id(t): t for t in (*tensors_in((args, kwargs)), *results)}
        work.num_bytes += sum(t.numel() * t.element_size() for t in touched.values())
        return result


_FREE = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.lift_fresh.default,
}
"""Operations that are no views and move nothing."""
