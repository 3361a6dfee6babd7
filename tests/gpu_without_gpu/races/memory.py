"""Which stream has last read and written which bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.gpu_without_gpu.races.clocks import HOST


class Access(NamedTuple):
    """Bytes [begin, end) of a storage that an operation reads or writes."""

    begin: int
    end: int
    is_write: bool
    stream: int
    number: int
    """Of the operation, over all streams."""
    what: str
    held_for: int = HOST
    """A stream: until that waits for the operation, its tensors are kept alive, as NCCL's are."""

    def conflicts_with(self, earlier: Access) -> bool:
        """Return whether the two may not be in flight together."""
        overlap = self.begin < earlier.end and earlier.begin < self.end
        return overlap and (self.is_write or earlier.is_write)


@dataclass
class Block:
    """Memory of one storage, from its allocation until it is freed."""

    stream: int
    """On whose behalf the allocator gave it, and will give it again to what comes next."""
    accesses: list[Access] = field(default_factory=list)
    users: set[tuple[str, int]] = field(default_factory=set)
    """Streams that `record_stream` named, for which the allocator waits; and by which clocks."""
    is_host: bool = False

    def add(self, access: Access) -> list[Access]:
        """Keep an access; return earlier ones that must not be in flight any more."""
        found = [earlier for earlier in self.accesses if access.conflicts_with(earlier)]
        # A write is ordered after all that it replaces, or has been reported.
        self.accesses = [
            earlier
            for earlier in self.accesses
            if not (
                access.begin <= earlier.begin
                and earlier.end <= access.end
                and (access.is_write or (not earlier.is_write and earlier.stream == access.stream))
            )
        ]
        self.accesses.append(access)
        return found


class Memory:
    """The blocks of all storages that have been seen."""

    def __init__(self, freed: Callable[[Block], None]) -> None:
        """
        Args:
            freed: called when a storage is no more.
        """
        self._freed = freed
        self._blocks: dict[int, tuple[Any, Block]] = {}

    def block_of(self, storage: torch.UntypedStorage, stream: int) -> Block:
        """Return the block of a storage; if it is not known, `stream` has asked for it."""
        key = id(storage)
        known = self._blocks.get(key)
        if known is not None and known[0]() is storage:
            return known[1]
        block = Block(stream)

        def is_gone(reference: object) -> None:
            # The number may belong to another storage by now.
            if key in self._blocks and self._blocks[key][0] is reference:
                del self._blocks[key]
            self._freed(block)

        self._blocks[key] = (weakref.ref(storage, is_gone), block)
        return block

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Take the block of a storage that is resized for freed, without a call."""
        self._blocks.pop(id(storage), None)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte in its storage and the one after the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    item, begin = tensor.element_size(), tensor.storage_offset()
    return begin * item, (begin + last + 1) * item


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
