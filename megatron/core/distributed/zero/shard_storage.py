"""Where the own shards of parameters are: in the device's memory, in a file, or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.core.distributed.flat_params import FlatParams
from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.offload.device_copies import Copy, DeviceCopies, device_copies
from megatron.core.offload.file_state_store import reserve_file
from megatron.core.transport.comm_buffer import BucketSlot, CommBuffer

UNITS_AHEAD = 2
"""Own shards of so many of the largest unit may be on the device ahead of their gathers."""


class ShardStorage:
    """Own values of all buckets, in memory that other ranks may read in place."""

    def __init__(self, buffer: CommBuffer, lengths: Sequence[int]) -> None:
        """
        Args:
            lengths: elements of the own shard of each bucket.
        """
        self.buffer = buffer
        self.shards: list[Tensor] = list(buffer.values.split(list(lengths)))
        """Own values of each bucket; padding is zero."""

    @property
    def copies(self) -> DeviceCopies | None:
        """What brings shards near; None where they are."""
        return None

    def slot(self, number: int) -> BucketSlot | None:
        """Return where other ranks find the own shard of a bucket."""
        return self.buffer.slot(number)

    def take_copy(self, number: int) -> Copy | None:
        """Return the copy of a shard that a gather reads; None if it reads the shard itself."""
        return None

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """Begin to bring near what is gathered next; return whether more may follow."""
        return False

    def page_out(self, numbers: Iterable[int]) -> None:
        """Give up memory of shards that can be had again."""

    def forget_copies(self) -> None:
        """Drop what was brought near: the shards may change."""

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the shards any more."""
        self.buffer.wait_for_readers()


class FileShards(ShardStorage):
    """Shards in a file, which the disk reads ahead."""

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """See `ShardStorage`; one unit at a time."""
        for number in numbers:
            self.buffer.prefetch(self.shards[number])
        return False

    def page_out(self, numbers: Iterable[int]) -> None:
        """See `ShardStorage`."""
        for number in numbers:
            self.buffer.page_out(self.shards[number])


class HostShards(ShardStorage):
    """Shards in host memory, each copied to the device for its gather.

    Copies are made ahead of their gathers, as long as those that wait for theirs take no more than
    a given number of bytes: the rest of this rank's parameters takes no memory on the device.
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
            values: [n], of the host; pinned where a device copies by itself.
            most_bytes: of copies that are ahead of their gather; one unit always is.
        """
        super().__init__(CommBuffer(values, None), lengths)
        self.most_bytes = most_bytes
        self._copies = copies or device_copies(device)
        self._ahead: dict[int, tuple[Copy, int]] = {}
        """Bucket -> its copy, and the version of the shard that was copied."""

    @property
    def copies(self) -> DeviceCopies:
        """See `ShardStorage`."""
        return self._copies

    def slot(self, number: int) -> None:
        """See `ShardStorage`: others cannot read what is on the way."""

    def take_copy(self, number: int) -> Copy:
        """See `ShardStorage`."""
        copy, version = self._ahead.pop(number, (None, -1))
        if copy is None or version != self.shards[number]._version:
            return self._copies.start(self.shards[number])
        return copy

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """See `ShardStorage`."""
        missing = [number for number in numbers if number not in self._ahead]
        asked = sum(self.shards[number].nbytes for number in missing)
        ahead = sum(self.shards[number].nbytes for number in self._ahead)
        if missing and ahead and ahead + asked > self.most_bytes:
            return False
        for number in missing:
            shard = self.shards[number]
            self._ahead[number] = (self._copies.start(shard), shard._version)
        return True

    def forget_copies(self) -> None:
        """See `ShardStorage`."""
        for copy, _ in self._ahead.values():
            copy.wait()
        self._ahead = {}


def shard_storage(
    flat: FlatParams, lengths: Sequence[int], *, path: str | None, is_on_host: bool
) -> ShardStorage:
    """Return memory for the own shards.

    Args:
        lengths: elements of the own shard of each bucket.
        path: a directory, for a file in which they are.
        is_on_host: they are in host memory, whatever the device is.
    Raises:
        ConfigError: on all ranks, if one of them cannot have the file.
    """
    if path is not None:
        return FileShards(_zeros_in_file(path, sum(lengths), flat), lengths)
    if is_on_host:
        is_pinned = not is_host_memory(flat.device)
        values = torch.zeros(sum(lengths), dtype=flat.dtype, pin_memory=is_pinned)
        largest = max(sum(lengths[n] for n in numbers) for numbers in flat.plan.sections)
        most_bytes = UNITS_AHEAD * largest * flat.dtype.itemsize
        return HostShards(values, lengths, flat.device, most_bytes=most_bytes)
    return ShardStorage(flat.zeros(sum(lengths), flat.dtype), lengths)


def _zeros_in_file(directory: str, numel: int, flat: FlatParams) -> CommBuffer:
    problem: MegatronError | None = None
    buffer = None
    reserve = partial(reserve_file, directory, flag="--param-offload-path")
    try:
        buffer = CommBuffer.in_file(
            numel, flat.dtype, num_buckets=flat.plan.num_buckets, reserve=reserve
        )
    except ConfigError as error:
        problem = error
    if (problem := flat.mesh.agreed(problem)) is not None:
        raise problem
    assert buffer is not None
    return buffer
