"""Storage of the own shards of parameters: device memory, a file, or host memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.flat_params import FlatParams
from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.offload.device_copies import Copy, DeviceCopies, device_copies
from megatron.core.offload.state_stores import reserve_file

UNITS_AHEAD = 2
"""Own shards of this many of the largest unit may be on the device before their gathers."""


class ShardStorage:
    """Own values of all buckets."""

    copies: DeviceCopies | None = None
    """Copies shards to the device; None if gathers read the shards themselves."""

    def __init__(self, values: Tensor, lengths: Sequence[int]) -> None:
        """
        Args:
            values: [n].
            lengths: elements of the own shard of each bucket.
        """
        self.shards: list[Tensor] = list(values.split(list(lengths)))
        """Own values of each bucket; padding is zero."""

    def take_copy(self, number: int) -> Copy | None:
        """Return the copy of a shard that a gather reads; None if it reads the shard itself."""
        return None

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """Start to read or copy shards that are gathered next; return whether more may follow."""
        return False

    def page_out(self, numbers: Iterable[int]) -> None:
        """Unmap shards that are stored in a file."""

    def forget_copies(self) -> None:
        """Drop copies of shards: the shards may change."""


class FileShards(ShardStorage):
    """Shards in a file, which is mapped into memory and read ahead."""

    def __init__(self, file: int, lengths: Sequence[int], dtype: torch.dtype) -> None:
        """
        Args:
            file: descriptor of a file of zeros; this object closes it.
        """
        numel = sum(lengths)
        self._memory = mmap.mmap(file, numel * dtype.itemsize)
        os.close(file)
        values = torch.frombuffer(self._memory, dtype=dtype, count=numel)
        self._address = values.data_ptr()
        super().__init__(values, lengths)

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """Make the system read the shards of one unit ahead."""
        for number in numbers:
            self._advise(number, mmap.MADV_WILLNEED)
        return False

    def page_out(self, numbers: Iterable[int]) -> None:
        """Unmap the pages of shards; the values stay in the file."""
        for number in numbers:
            self._advise(number, mmap.MADV_DONTNEED)

    def _advise(self, number: int, advice: int) -> None:
        shard = self.shards[number]
        begin = shard.data_ptr() - self._address
        first = begin - begin % mmap.PAGESIZE
        self._memory.madvise(advice, first, begin + shard.nbytes - first)


class HostShards(ShardStorage):
    """Shards in host memory, each copied to the device for its gather.

    Copies are made before their gathers, as long as the copies that wait for a gather take at most
    a given number of bytes. The rest of this rank's parameters takes no memory on the device.
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Sequence[int],
        device: torch.device,
        *,
        most_bytes: int,
        copies: DeviceCopies | None = None,
    ) -> None:
        """
        Args:
            values: [n], in host memory; pinned if the device copies asynchronously.
            most_bytes: of copies that wait for their gather; one unit is always allowed.
        """
        super().__init__(values, lengths)
        self.most_bytes = most_bytes
        self.copies: DeviceCopies = copies or device_copies(device)
        self._ahead: dict[int, tuple[Copy, int]] = {}
        """Bucket -> its copy, and the version of the shard that was copied."""

    def take_copy(self, number: int) -> Copy:
        """Return the copy that was started before, or start one."""
        copy, version = self._ahead.pop(number, (None, -1))
        if copy is None or version != self.shards[number]._version:
            return self.copies.start(self.shards[number])
        return copy

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """Start to copy the shards of a unit, if the limit of bytes allows it."""
        missing = [number for number in numbers if number not in self._ahead]
        asked = sum(self.shards[number].nbytes for number in missing)
        ahead = sum(self.shards[number].nbytes for number in self._ahead)
        if missing and ahead and ahead + asked > self.most_bytes:
            return False
        for number in missing:
            shard = self.shards[number]
            self._ahead[number] = (self.copies.start(shard), shard._version)
        return True

    def forget_copies(self) -> None:
        """Wait for copies that no gather has used, and drop them."""
        for copy, _ in self._ahead.values():
            copy.wait()
        self._ahead = {}


def shard_storage(
    flat: FlatParams, lengths: Sequence[int], *, path: str | None, is_on_host: bool
) -> ShardStorage:
    """Return storage for the own shards.

    Args:
        lengths: elements of the own shard of each bucket.
        path: a directory, to store them in a file there.
        is_on_host: store them in host memory, whatever the device is.
    Raises:
        ConfigError: on all ranks, if one of them cannot create the file.
    """
    if path is not None:
        return FileShards(_file_of_zeros(path, sum(lengths), flat), lengths, flat.dtype)
    if is_on_host:
        is_pinned = not is_host_memory(flat.device)
        values = torch.zeros(sum(lengths), dtype=flat.dtype, pin_memory=is_pinned)
        largest = max(sum(lengths[n] for n in numbers) for numbers in flat.plan.sections)
        most_bytes = UNITS_AHEAD * largest * flat.dtype.itemsize
        return HostShards(values, lengths, flat.device, most_bytes=most_bytes)
    values = torch.zeros(sum(lengths), dtype=flat.dtype, device=flat.device)
    return ShardStorage(values, lengths)


def _file_of_zeros(directory: str, numel: int, flat: FlatParams) -> int:
    problem: MegatronError | None = None
    file = -1
    try:
        num_bytes = numel * flat.dtype.itemsize
        file = reserve_file(directory, num_bytes, flag="--param-offload-path")
    except ConfigError as error:
        problem = error
    if (problem := flat.mesh.agreed(problem)) is not None:
        raise problem
    return file
