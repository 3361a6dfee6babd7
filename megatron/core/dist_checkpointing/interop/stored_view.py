"""Tensors in files: the positions of their bytes, and reading a box of a tensor.

Nothing is read until a box is requested. Then only the bytes around that box are read, in pieces of
a bounded size.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    LocalFile,
    open_local,
)
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.shard_file import as_bytes
from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.errors import shown

MAX_DIMS = 64
MAX_SHARED_BYTES = 1 << 20
"""Most bytes of a tensor whose elements share memory (strides of 0: a mask, an expanded row), if
its storage is smaller."""
SLAB_BYTES = 32 << 20
"""Most bytes held at once while a box is read."""


@dataclass(frozen=True)
class StoredBytes:
    """A run of bytes in a file of a checkpoint."""

    path: Path
    begin: int
    num_bytes: int
    crc32: int | None = None
    """Checksum of these bytes, if the file has one."""
    memory: Tensor | None = field(default=None, compare=False)
    """The bytes themselves, if torch had to load the file."""


@dataclass(frozen=True)
class StoredView:
    """A strided tensor over stored bytes, as torch describes one: counts are elements."""

    storage: StoredBytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def problem(self) -> str | None:
        """Return why this is not a tensor inside its storage; None if it is one."""
        if len(self.shape) != len(self.stride) or len(self.shape) > MAX_DIMS:
            return f"shape {shown(self.shape)} and strides {shown(self.stride)} of one tensor"
        if self.offset < 0 or any(n < 0 for n in (*self.shape, *self.stride)):
            return "a negative size, stride or offset"
        if 0 in self.shape:
            return None
        extent = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) + 1
        if (self.offset + extent) * self.dtype.itemsize > self.storage.num_bytes:
            return (
                f"a tensor of shape {shown(self.shape)} at element {self.offset} ends after its "
                f"storage of {self.storage.num_bytes} bytes"
            )
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        if num_bytes > max(self.storage.num_bytes, MAX_SHARED_BYTES):
            return (
                f"a tensor of shape {shown(self.shape)} and strides {shown(self.stride)} over a "
                f"storage of {self.storage.num_bytes} bytes: its elements share memory"
            )
        return None

    def narrow(self, box: Box) -> StoredView:
        """Return the view of a box (offset, shape) of this tensor."""
        shift = sum(o * s for o, s in zip(box[0], self.stride, strict=True))
        return replace(self, shape=tuple(box[1]), offset=self.offset + shift)

    def unflattened(self, shape: Sequence[int], first: int) -> StoredView:
        """Return the tensor of `shape` whose element 0 is element `first` of this flat view.

        Only the boxes that are inside this view may be read: `first` may be negative.
        """
        assert self.is_contiguous, self
        stride = contiguous_stride(shape)
        return replace(self, shape=tuple(shape), stride=stride, offset=self.offset + first)

    def reshaped(self, shape: Sequence[int]) -> StoredView:
        """Return a contiguous view under another shape of as many elements."""
        assert self.is_contiguous, self
        return replace(self, shape=tuple(shape), stride=contiguous_stride(shape))

    def fill(self, into: Tensor, reader: ViewReader) -> None:
        """Fill `into`, of this view's shape and any dtype and device, from the file."""
        reader.verify(self.storage)
        reader.read_strided(self, into)

    @property
    def is_contiguous(self) -> bool:
        """Whether elements follow each other in row-major order."""
        expected = contiguous_stride(self.shape)
        return all(
            n <= 1 or s == e for n, s, e in zip(self.shape, self.stride, expected, strict=True)
        )


def sizes_of(value: object) -> tuple[int, ...]:
    """Return a shape or offset that a file contains.

    Raises:
        DamagedCheckpointError: it is neither.
    """
    if (
        not isinstance(value, (list, tuple))
        or len(value) > MAX_DIMS
        or any(type(n) is not int or not 0 <= n < 1 << 62 for n in value)
    ):
        raise DamagedCheckpointError(f"{shown(value)} is not a shape or offset.")
    return tuple(value)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class ViewReader:
    """Reads stored views; keeps files open. Use as a context manager; not thread-safe.

    A storage with a checksum is verified whole when its first element is read.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._stack = contextlib.ExitStack()
        self._files: dict[Path, LocalFile] = {}
        self._verified: set[StoredBytes] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def file(self, path: Path) -> LocalFile:
        """Return an open regular file."""
        if path not in self._files:
            self._files[path] = self._stack.enter_context(open_local(path.parent, path.name))
        return self._files[path]

    def read(self, view: StoredView, into: Tensor) -> None:
        """Fill `into`, of the view's shape and any dtype and device, from the file."""
        if into.numel() == 0:
            return
        view.fill(into, self)

    def read_full(self, view: StoredView) -> Tensor:
        """Return a new CPU tensor with the view's contents."""
        into = torch.empty(view.shape, dtype=view.dtype)
        self.read(view, into)
        return into

    def read_strided(self, view: StoredView, into: Tensor) -> None:
        """Fill `into` with the elements of a view, in pieces."""
        item = view.dtype.itemsize
        if view.storage.memory is not None:
            held = view.storage.memory[: view.storage.num_bytes // item * item].view(view.dtype)
            into.copy_(held.as_strided(view.shape, view.stride, view.offset))
            self.bytes_read += into.numel() * item
            return
        file = self.file(view.storage.path)
        position = view.storage.begin + view.offset * item
        if (
            view.is_contiguous
            and into.is_contiguous()
            and is_host_memory(into.device)
            and into.dtype == view.dtype
        ):
            # The file's bytes are the tensor's bytes in the same order.
            memory = as_bytes(into)
            file.read_into(memory, position)
            self.bytes_read += len(memory)
            return
        extent = sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)) + 1
        if extent * item > SLAB_BYTES and into.numel() > 1:
            # Halve along the axis that spans most bytes.
            spans = [(n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)]
            axis = spans.index(max(spans))
            half = view.shape[axis] // 2
            for begin, length in ((0, half), (half, view.shape[axis] - half)):
                corner = tuple(begin if d == axis else 0 for d in range(len(spans)))
                size = tuple(length if d == axis else n for d, n in enumerate(view.shape))
                self.read_strided(view.narrow((corner, size)), into.narrow(axis, begin, length))
            return
        data = torch.empty(extent * item, dtype=torch.uint8)
        file.read_into(data.numpy().data, position)
        self.bytes_read += extent * item
        into.copy_(data.view(view.dtype).as_strided(view.shape, view.stride))

    def verify(self, storage: StoredBytes) -> None:
        """Compare the bytes with their checksum, when they are first read."""
        if storage.crc32 is None or storage in self._verified:
            return
        file, found = self.file(storage.path), 0
        scratch = bytearray(min(SLAB_BYTES, storage.num_bytes))
        for begin in range(0, storage.num_bytes, SLAB_BYTES):
            part = memoryview(scratch)[: min(SLAB_BYTES, storage.num_bytes - begin)]
            file.read_into(part, storage.begin + begin)
            found = zlib.crc32(part, found)
        if found != storage.crc32:
            raise DamagedCheckpointError(
                f"{storage.path} is corrupt: bytes {storage.begin} to "
                f"{storage.begin + storage.num_bytes - 1} do not have their checksum.",
                rule="the CRC-32 of a record must be the one in the file's directory",
                fix="use another checkpoint; check the storage",
            )
        self._verified.add(storage)
