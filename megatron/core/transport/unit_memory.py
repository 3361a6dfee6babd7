"""Memory for units that are gathered from the shards of all ranks, used, and freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.topology.group import Group
from megatron.core.transport.comm_buffer import CommBuffer
from megatron.core.transport.shm.mapped_gather import map_gather
from megatron.core.transport.shm.page_pool import PagePool
from megatron.core.transport.transport import has_tags
from megatron.core.transport.work import Work


class UnitTensor(Protocol):
    """A flat tensor that keeps its address, with memory from `allocate` to `free` only."""

    tensor: Tensor
    """[n]."""
    is_allocated: bool

    def allocate(self) -> None:
        """Have memory."""
        ...

    def free(self) -> None:
        """Give the memory up."""
        ...


class UnitMemory:
    """The tensors of all units of a layout.

    Ranks of one machine do not copy values to gather them: they map the shards of the others side
    by side. Elsewhere units pass their memory on to each other.
    """

    def __init__(
        self,
        shards: CommBuffer,
        group: Group,
        device: torch.device,
        units: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        """
        Args:
            shards: of this rank.
            group: of the ranks that have the others.
            units: of each, the ranges [begin, end) of `shards` that it consists of, one after
                another; from every rank as much.
        Communication:
            at most that of `map_gather`.
        """
        dtype, size = shards.values.dtype, group.size()
        self._pool, self._mapped = PagePool(device), None
        if shards.memory is not None and (size == 1 or has_tags(group)):
            item = dtype.itemsize
            layouts = [[(b * item, (e - b) * item) for b, e in unit] for unit in units]
            self._mapped = map_gather(shards.memory, group, dtype, layouts)
        self.tensors: Sequence[UnitTensor]
        if self._mapped is not None:
            self.tensors = self._mapped.tensors
        else:
            lengths = [size * sum(e - b for b, e in unit) for unit in units]
            self.tensors = [self._pool.tensor(length, dtype) for length in lengths]

    def start_mapped_gather(self) -> Work[None] | None:
        """Start to wait for the values of the other ranks; None where they have to be copied."""
        return None if self._mapped is None else self._mapped.start()

    def wait_for_mapped_readers(self) -> bool:
        """Wait until no rank reads mapped values any more; False where nothing is mapped."""
        if self._mapped is not None:
            self._mapped.wait_for_readers()
        return self._mapped is not None

    def trim(self) -> None:
        """Return spare memory to the system."""
        self._pool.trim()
