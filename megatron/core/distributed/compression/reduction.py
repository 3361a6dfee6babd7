"""Reduction of a bucket in a compressed wire format, as matrices of low rank, or of few values.

Each rank packs what it sends to an owner, the owner adds in fp32 and rank order, and where
everybody needs the sum, it packs the sum and all ranks, itself included, take what was packed:
all ranks end with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.compression.codecs import BFloat16Codec, BlockInt8Codec, Codec
from megatron.core.distributed.compression.largest import add_sent, num_sent, take_largest
from megatron.core.distributed.compression.powersgd import LowRankMatrices
from megatron.core.topology.group import Group
from megatron.core.transport.ordered_sum import piece_of
from megatron.core.transport.transport import message_transport
from megatron.core.transport.work import Steps


@dataclass
class TrafficCount:
    """Bytes that one rank has sent for gradients."""

    sent: int = 0
    plain: int = 0
    """What the same reductions send without compression."""


@dataclass(frozen=True)
class CompressionSettings:
    """How the gradients of a buffer travel."""

    kind: str = "none"
    rank: int = 4
    """Of the matrices of "powersgd"."""
    warmup_reductions: int = 0
    """Reductions of a bucket that are not compressed: gradients change fast at first."""
    fraction: float = 0.01
    """Of the gradients, sent by "topk"."""


class CompressedReduction:
    """The reductions of one bucket, step after step: they share errors and subspaces."""

    def __init__(
        self,
        settings: CompressionSettings,
        matrices: list[tuple[int, int, int]],
        numel: int,
        traffic: TrafficCount,
    ) -> None:
        """
        Args:
            matrices: (begin, rows, columns) of the matrices that are in the bucket.
            numel: of the bucket.
            traffic: counts what is sent; shared by the buckets of a buffer.
        """
        self.settings, self.traffic = settings, traffic
        self._num_reductions = 0
        self._format: Codec | None = None
        self._low_rank: LowRankMatrices | None = None
        self._errors: dict[str, Tensor] = {}
        if settings.kind == "powersgd":
            self._low_rank = LowRankMatrices(matrices, numel, settings.rank)
        elif settings.kind != "topk":
            self._format = BFloat16Codec() if settings.kind == "bf16" else BlockInt8Codec()

    def is_on(self, bucket: Tensor, mesh: Mesh) -> bool:
        """Count a reduction that begins, and return whether it is to be compressed."""
        plain = _plain_bytes(bucket, mesh)
        self.traffic.plain += plain
        self._num_reductions += 1
        if mesh.size == 1 or self._num_reductions > self.settings.warmup_reductions:
            return mesh.size > 1
        self.traffic.sent += plain
        return False

    def reduce(self, bucket: Tensor, mesh: Mesh, factor: float, tag: int) -> Steps[None]:
        """Leave factor * sum over the mesh in `mesh.own(bucket)`; see `reduce_gradients`."""
        # Half-precision buckets are packed from, and added in, fp32.
        work = bucket.float()
        if self._low_rank is not None:
            yield from self._reduce_low_rank(work, mesh, tag)
        elif self._format is None:
            yield from self._reduce_largest(work, mesh, tag)
        else:
            own = work
            if mesh.shard_size > 1:
                yield from self._scatter(own, mesh.shard, "shard", tag)
                own = mesh.own(own)
            if mesh.replicate_size > 1:
                yield from self._scatter(own, mesh.replicate, "replicate", tag)
                yield from self._gather(own, mesh.replicate, tag)
        result = mesh.own(bucket)
        result.copy_(mesh.own(work).mul_(factor))

    def _scatter(self, values: Tensor, group: Group, axis: str, tag: int) -> Steps[None]:
        """Sum over a group what other ranks sent of this rank's piece, into that piece."""
        assert self._format is not None
        rank, size = group.rank(), group.size()
        self._add_error(values, axis)
        packed = self._format.pack(values)
        self._keep_error(values, packed, axis)
        received = torch.empty_like(packed)
        yield from message_transport(group, tag).all_to_all(packed, received)
        self.traffic.sent += packed.numel() // size * (size - 1)
        total: Tensor | None = None
        for sender in range(size):
            term = self._format.unpack(piece_of(received, sender, size))
            total = term if total is None else total.add_(term)
        assert total is not None
        piece_of(values, rank, size).copy_(total)

    def _gather(self, values: Tensor, group: Group, tag: int) -> Steps[None]:
        """Give every rank all pieces, each as its owner packed it."""
        assert self._format is not None
        rank, size = group.rank(), group.size()
        own = piece_of(values, rank, size)
        self._add_error(own, "sum")
        packed = self._format.pack(own)
        self._keep_error(own, packed, "sum")
        received = packed.new_empty(packed.numel() * size)
        yield from message_transport(group, tag).all_gather(packed, out=received)
        self.traffic.sent += packed.numel() * (size - 1)
        values.copy_(self._format.unpack(received))

    def _reduce_low_rank(self, values: Tensor, mesh: Mesh, tag: int) -> Steps[None]:
        """Sum over all ranks of the mesh in low rank; every rank gets all of the sum."""
        assert self._low_rank is not None
        matrices = self._low_rank
        self._add_error(values, "bucket")
        groups = [g for g in (mesh.shard, mesh.replicate) if g.size() > 1]
        message = matrices.project(values, mesh.size)
        for group in groups:
            yield from message_transport(group, tag).all_reduce(message)
            self._count_all_reduce(message, group)
        left = matrices.project_back(values, message, mesh.size)
        # What this rank failed to say: its own gradient less its part of the approximation.
        for group in groups:
            yield from message_transport(group, tag).all_reduce(left)
            self._count_all_reduce(left, group)
        before = values.clone()
        matrices.rebuild(values, message, left)
        matrices.keep_error(before, self._error("bucket", before))

    def _reduce_largest(self, values: Tensor, mesh: Mesh, tag: int) -> Steps[None]:
        """Sum the largest values of each rank of the mesh; every rank gets all of the sum."""
        self._add_error(values, "bucket")
        sent = message = take_largest(values, num_sent(values.numel(), self.settings.fraction))
        error = self._error("bucket", values)
        # After an overflow under loss scaling the step is skipped; nothing of it must remain.
        torch.nan_to_num(values, 0.0, 0.0, 0.0, out=error)
        for group in (mesh.shard, mesh.replicate):
            if group.size() > 1:
                received = message.new_empty(message.numel() * group.size())
                yield from message_transport(group, tag).all_gather(message, out=received)
                self.traffic.sent += message.numel() * (group.size() - 1)
                message = received
        values.zero_()
        # In one order on all ranks, so that all have the same bits.
        for of_rank in message.split(sent.numel()):
            add_sent(values, of_rank)

    def _count_all_reduce(self, message: Tensor, group: Group) -> None:
        size = group.size()
        self.traffic.sent += int(2 * (size - 1) / size * message.nbytes)

    def _error(self, axis: str, like: Tensor) -> Tensor:
        if axis not in self._errors:
            self._errors[axis] = torch.zeros_like(like)
        return self._errors[axis]

    def _add_error(self, values: Tensor, axis: str) -> None:
        if axis in self._errors:
            values.add_(self._errors[axis])

    def _keep_error(self, values: Tensor, packed: Tensor, axis: str) -> None:
        assert self._format is not None
        if self._format.keeps_error:
            error = self._error(axis, values)
            torch.sub(values, self._format.unpack(packed), out=error)
            # After an overflow under loss scaling the step is skipped; nothing of it must remain.
            error.nan_to_num_(0.0, 0.0, 0.0)


def _plain_bytes(bucket: Tensor, mesh: Mesh) -> int:
    """Return what a rank sends for a bucket without compression."""
    length, sent = bucket.numel(), 0
    if mesh.shard_size > 1:
        length //= mesh.shard_size
        sent += (mesh.shard_size - 1) * length
    if mesh.replicate_size > 1:
        sent += 2 * (mesh.replicate_size - 1) * (length // mesh.replicate_size)
    return sent * bucket.element_size()
