"""Small collectives of the loop: ranks tell each other one value, or sum a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device


def _has_peers(group: Any) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return (dist.get_world_size() if group is None else group.size()) > 1


def _place(group: Any) -> torch.device:
    """Return where tensors of a collective live: NCCL takes device memory only."""
    is_cpu = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if is_cpu else device.current_device()


def any_rank(claim: bool, group: Any = None) -> bool:
    """Return whether any rank of `group` (None: all processes) makes the claim.

    Communication:
        one all-reduce of one number; none with one process.
    """
    if not _has_peers(group):
        return claim
    flag = torch.tensor([float(claim)], device=_place(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def max_over_ranks(value: int) -> int:
    """Return the largest `value` of all processes.

    Communication:
        one all-reduce of one number; none with one process.
    """
    if not _has_peers(None):
        return value
    number = torch.tensor([value], dtype=torch.int64, device=_place(None))
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number.item())


def of_rank(value: Any, source: int = 0, group: Any = None) -> Any:
    """Return what rank `source` of `group` (None: all processes) holds, any picklable value.

    Communication:
        one broadcast of its pickle; none with one process.
    """
    if not _has_peers(group):
        return value
    slot = [value]
    source = source if group is None else dist.get_global_rank(group, source)
    dist.broadcast_object_list(slot, src=source, group=group, device=_place(group))
    return slot[0]


def sum_over(values: Sequence[float], group: Any) -> list[float]:
    """Return the sums over `group` of each number, in fp64; equal on all its ranks.

    Communication:
        one all-reduce; none in a group of one.
    """
    if not _has_peers(group):
        return list(values)
    numbers = torch.tensor(values, dtype=torch.float64, device=_place(group))
    dist.all_reduce(numbers, group=group)
    return numbers.tolist()


def union_over_ranks(names: Sequence[str]) -> list[str]:
    """Return the names that any process has, in one order on all of them.

    Communication:
        one all-gather of small Python objects; none with one process.
    """
    if not _has_peers(None):
        return list(names)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(names))
    return list(dict.fromkeys(name for mine in gathered for name in mine))


def barrier() -> None:
    """Wait for all processes."""
    if _has_peers(None):
        dist.barrier()
