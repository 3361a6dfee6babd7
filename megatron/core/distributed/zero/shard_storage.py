"""Where the own shards of parameters are: in the device's memory, in a file, or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.core.distributed.flat_params import FlatParams
from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.offload.device_copies import DeviceCopies, device_copies
from megatron.core.offload.file_state_store import reserve_file
from megatron.core.transport.comm_buffer import BucketSlot, CommBuffer
from megatron.core.transport.object_collectives import raise_on_all_ranks


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

    def contribution(self, number: int) -> tuple[Tensor, BucketSlot | None]:
        """Return the own shard of a bucket as a gather takes it, and where others find it."""
        return self.shards[number], self.buffer.slot(number)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to bring near what is gathered next."""

    def page_out(self, numbers: Iterable[int]) -> None:
        """Give up memory of shards that can be had again."""

    def forget_copies(self) -> None:
        """Drop what was brought near: the shards may change."""

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the shards any more."""
        self.buffer.wait_for_readers()


class FileShards(ShardStorage):
    """Shards in a file, which the disk reads ahead."""

    def prefetch(self, numbers: Iterable[int]) -> None:
        """See `ShardStorage`."""
        for number in numbers:
            self.buffer.prefetch(self.shards[number])

    def page_out(self, numbers: Iterable[int]) -> None:
        """See `ShardStorage`."""
        for number in numbers:
            self.buffer.page_out(self.shards[number])


class HostShards(ShardStorage):
    """Shards in host memory, each copied to the device for its gather.

    On the device are at most the copies of the units that are gathered now and next: the rest of
    this rank's parameters takes no memory there.
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Sequence[int],
        device: torch.device,
        copies: DeviceCopies | None = None,
    ) -> None:
        """
        Args:
            values: [n], of the host; pinned where a device copies by itself.
        """
        super().__init__(CommBuffer(values, None), lengths)
        self._copies = copies or device_copies(device)
        self._near: dict[int, Callable[[], Tensor]] = {}

    def contribution(self, number: int) -> tuple[Tensor, BucketSlot | None]:
        """See `ShardStorage`; waits for the copy."""
        self.prefetch([number])
        return self._near.pop(number)(), None

    def prefetch(self, numbers: Iterable[int]) -> None:
        """See `ShardStorage`."""
        for number in numbers:
            if number not in self._near:
                self._near[number] = self._copies.start(self.shards[number])

    def forget_copies(self) -> None:
        """See `ShardStorage`."""
        for wait in self._near.values():
            wait()
        self._near = {}


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
        return HostShards(values, lengths, flat.device)
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
    for group in (flat.mesh.shard, flat.mesh.replicate):
        try:
            raise_on_all_ranks(problem, group)
        except MegatronError as error:
            problem = error  # for those on the other axis, too
    if problem is not None:
        raise problem
    assert buffer is not None
    return buffer
