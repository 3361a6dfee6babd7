"""One protocol for the collectives of a group, and the choice of its implementation.

| transport | ranks | of an operation's later steps |
|---|---|---|
| `NativeTransport` | the backend's own collectives (NCCL) | has none |
| `GlooTransport` | on CPUs, with algorithms that move less than gloo's | has none |
| `MessageTransport` | on CPUs, for buckets of which several are in flight | matched by tags |
| `ShmTransport` | of one machine: tensors are copied through shared slots | in one order |
| `ShmBucketTransport` | of one machine: buckets in shared memory are read in place | by counters |

Sums over the ranks of CPUs are computed in rank order, but for gloo's own all-reduce.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation.device import maps_pages
from megatron.core.topology.group import Group
from megatron.core.transport.backend import has_peers
from megatron.core.transport.shm.shm_bucket_transport import BucketSlot, ShmBucketTransport
from megatron.core.transport.shm.shm_collectives import open_shm_group
from megatron.core.transport.shm.shm_transport import ShmTransport
from megatron.core.transport.torch_transport import (
    GlooTransport,
    MessageTransport,
    NativeTransport,
)
from megatron.core.transport.work import Work


class Transport(Protocol):
    """Collectives between the ranks of one group on contiguous tensors.

    Dimension 0 is split into one piece for each rank, all of the same size. An operation starts at
    once; a generator may continue with its `Work` by `result = yield from work`.
    """

    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """Leave scale * sum over the ranks in `x` [t, ...], and return it."""
        ...

    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Return scale * sum over the ranks of this rank's piece: [t, ...] -> [t/tp, ...].

        Args:
            x: a scale other than 1 may leave anything in it.
            out: where the sums go; it may be this rank's piece of `x`. None is new memory.
        """
        ...

    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Return the pieces of all ranks in rank order: [t/tp, ...] -> [t, ...].

        Args:
            out: where they go; `x` may be this rank's piece of it. None is new memory.
        """
        ...


def select_transport(x: Tensor, group: Group) -> Transport:
    """Return how the ranks of `group` exchange tensors like `x` [...].

    All ranks start the operations of a group in one order.
    """
    if not x.is_cpu:
        return NativeTransport(group)
    shm = open_shm_group(group) if has_peers(group) and maps_pages(x.device) else None
    return GlooTransport(group) if shm is None else ShmTransport(group, shm)


def select_bucket_transport(
    group: Group,
    tag: int,
    slot: BucketSlot | None = None,
    *,
    averages: bool = False,
    is_in_order: bool = True,
) -> Transport | None:
    """Return how the ranks of `group` exchange a bucket [n]; None for a single rank.

    Several buckets are in flight at a time, overlapping with each other and with the computation.

    Args:
        tag: tells the messages of different buckets apart, where the backend has tags.
        slot: of the bucket, if ranks of this machine can read it.
        averages: let the collective average over the ranks, where the backend can.
        is_in_order: all ranks start the operations in one order, as those of first steps are.
    Communication:
        that of `SharedBuffer.peers`.
    """
    if group.size() == 1:
        return None
    peers = slot.memory.peers(group) if slot is not None and has_tags(group) else None
    if slot is not None and peers is not None:
        return ShmBucketTransport(slot, peers, group, tag)
    return message_transport(group, tag, averages=averages, is_in_order=is_in_order)


def message_transport(
    group: Group, tag: int, *, averages: bool = False, is_in_order: bool = False
) -> MessageTransport | NativeTransport:
    """Return how the ranks of `group` exchange flat tensors that no other rank can read.

    Args:
        is_in_order: see `select_bucket_transport`; later steps of an operation are not.
    """
    if has_tags(group):
        return MessageTransport(group, tag, is_in_order=is_in_order)
    return NativeTransport(group, averages=averages, blocks=not is_in_order)


def has_tags(group: Group) -> TypeGuard[dist.ProcessGroup]:
    """Return whether the backend of `group` matches messages by tags: gloo and MPI, not NCCL."""
    return isinstance(group, dist.ProcessGroup) and dist.get_backend(group) in (
        dist.Backend.GLOO,
        dist.Backend.MPI,
    )
