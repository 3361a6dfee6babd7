"""Compressed reductions of a bucket of gradients: bf16, int8, low rank (PowerSGD), or top-k.

Each rank packs its messages to an owner, and the owner adds in fp32 and rank order. If all ranks
need the sum, the owner packs the sum and all ranks, the owner included, unpack it: all ranks get
the same bits.

The error of one step is kept and added to the gradient of the next step ("error feedback", S.
Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv
1901.09847), so over time all of the gradient is sent. `torch.distributed.algorithms` has PowerSGD
too, as a hook of torch's DDP that all-reduces whole buckets; here gradients may be sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.distributed_data_parallel_config import DataParallelFlags
from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.parameters.rng import derive_seed
from megatron.core.topology.group import Group
from megatron.core.transport.transport import bucket_transport, piece_of
from megatron.core.transport.work import Steps, Work

SCALE_BYTES = 4


@dataclass
class TrafficCount:
    """Bytes that one rank has sent for gradients."""

    sent: int = 0
    plain: int = 0
    """Bytes that the same reductions send without compression."""


class CompressedReduction:
    """The reductions of one bucket, step after step: they share errors and subspaces."""

    def __init__(
        self,
        settings: DataParallelFlags,
        matrices: list[tuple[int, int, int]],
        numel: int,
        traffic: TrafficCount,
    ) -> None:
        """
        Args:
            matrices: (begin, rows, columns) of the matrices in the bucket.
            numel: elements of the bucket.
            traffic: counts the bytes sent; shared by the buckets of a buffer.
        """
        self.settings, self.traffic = settings, traffic
        self._num_reductions = 0
        self._format: BFloat16Wire | BlockInt8Wire | None = None
        self._low_rank: LowRankMatrices | None = None
        self._errors: dict[str, Tensor] = {}
        if settings.grad_compression == "powersgd":
            self._low_rank = LowRankMatrices(matrices, numel, settings.powersgd_rank)
        elif settings.grad_compression != "topk":
            is_bf16 = settings.grad_compression == "bf16"
            self._format = BFloat16Wire() if is_bf16 else BlockInt8Wire()

    def is_on(self, bucket: Tensor, mesh: Mesh) -> bool:
        """Count a reduction that begins, and return whether to compress it."""
        plain = _plain_bytes(bucket, mesh)
        self.traffic.plain += plain
        self._num_reductions += 1
        if mesh.size == 1 or self._num_reductions > self.settings.grad_compression_warmup:
            return mesh.size > 1
        self.traffic.sent += plain
        return False

    def reduce(self, bucket: Tensor, mesh: Mesh, factor: float, tag: int) -> Work[Tensor]:
        """Write factor * sum of `bucket` [n] over the mesh to `mesh.own(bucket)`, and return it."""
        return Work(self._reduce(bucket, mesh, factor, tag))

    def _reduce(self, bucket: Tensor, mesh: Mesh, factor: float, tag: int) -> Steps[Tensor]:
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
        return mesh.own(bucket).copy_(mesh.own(work).mul_(factor))

    def _scatter(self, values: Tensor, group: Group, axis: str, tag: int) -> Steps[None]:
        """Sum this rank's piece over a group, from the messages of the other ranks."""
        assert self._format is not None
        rank, size = group.rank(), group.size()
        self._add_error(values, axis)
        packed = self._format.pack(values)
        self._keep_error(values, packed, axis)
        received = torch.empty_like(packed)
        yield from bucket_transport(group, tag).all_to_all(packed, received)
        self.traffic.sent += packed.numel() // size * (size - 1)
        total: Tensor | None = None
        for sender in range(size):
            term = self._format.unpack(piece_of(received, sender, size))
            total = term if total is None else total.add_(term)
        assert total is not None
        piece_of(values, rank, size).copy_(total)

    def _gather(self, values: Tensor, group: Group, tag: int) -> Steps[None]:
        """Gather all pieces on every rank, each packed by its owner."""
        assert self._format is not None
        rank, size = group.rank(), group.size()
        own = piece_of(values, rank, size)
        self._add_error(own, "sum")
        packed = self._format.pack(own)
        self._keep_error(own, packed, "sum")
        received = packed.new_empty(packed.numel() * size)
        yield from bucket_transport(group, tag).all_gather(packed, out=received)
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
            yield from bucket_transport(group, tag).all_reduce(message)
            self._count_all_reduce(message, group)
        left = matrices.project_back(values, message, mesh.size)
        for group in groups:
            yield from bucket_transport(group, tag).all_reduce(left)
            self._count_all_reduce(left, group)
        before = values.clone()
        matrices.rebuild(values, message, left)
        matrices.keep_error(before, self._error("bucket", before))

    def _reduce_largest(self, values: Tensor, mesh: Mesh, tag: int) -> Steps[None]:
        """Sum the largest values of each rank of the mesh; every rank gets all of the sum."""
        self._add_error(values, "bucket")
        count = max(1, math.ceil(self.settings.topk_fraction * values.numel()))
        sent = message = take_largest(values, count)
        error = self._error("bucket", values)
        # After an overflow under loss scaling the step is skipped; nothing of it must remain.
        torch.nan_to_num(values, 0.0, 0.0, 0.0, out=error)
        for group in (mesh.shard, mesh.replicate):
            if group.size() > 1:
                received = message.new_empty(message.numel() * group.size())
                yield from bucket_transport(group, tag).all_gather(message, out=received)
                self.traffic.sent += message.numel() * (group.size() - 1)
                message = received
        values.zero_()
        # In one order on all ranks, so that all have the same bits.
        for of_rank in message.split(sent.numel()):
            indices, terms = of_rank.view(torch.int32).view(2, -1)
            values[indices.long()] += terms.view(torch.float32)

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
    """Return the bytes that a rank sends for a bucket without compression."""
    length, sent = bucket.numel(), 0
    if mesh.shard_size > 1:
        length //= mesh.shard_size
        sent += (mesh.shard_size - 1) * length
    if mesh.replicate_size > 1:
        sent += 2 * (mesh.replicate_size - 1) * (length // mesh.replicate_size)
    return sent * bucket.element_size()


class BFloat16Wire:
    """bf16: half the bytes of fp32, too precise to need error feedback. Sums are in fp32."""

    keeps_error = False

    def pack(self, values: Tensor) -> Tensor:
        """Return uint8 [2n] of fp32 [n]."""
        return values.bfloat16().view(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return fp32 [n] of uint8 [2n]."""
        return packed.view(torch.bfloat16).float()


class BlockInt8Wire:
    """int8 with an fp32 scale per block: 3.9 times fewer bytes than fp32.

    T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", section 2.1, arXiv
    2110.02861: one outlier spoils the resolution of its own block only.
    """

    keeps_error = True

    def pack(self, values: Tensor) -> Tensor:
        """Return uint8 [n / BLOCK * (BLOCK + 4)] of fp32 [n]."""
        blocks = values.view(-1, BLOCK)
        scale = blocks.abs().amax(dim=1, keepdim=True).mul_(1 / 127)
        packed = torch.empty(
            blocks.shape[0], BLOCK + SCALE_BYTES, dtype=torch.uint8, device=values.device
        )
        # An infinite or NaN scale is sent too, and makes the block NaN on the receiving rank.
        levels = (blocks / scale.clamp_min(1e-38)).nan_to_num_(0.0, 0.0, 0.0).round_()
        packed[:, :BLOCK].view(torch.int8).copy_(levels)
        packed[:, BLOCK:].view(torch.float32).copy_(scale)
        return packed.view(-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return fp32 [n]; a block that was not finite is not finite."""
        blocks = packed.view(-1, BLOCK + SCALE_BYTES)
        scale = blocks[:, BLOCK:].view(torch.float32)
        return blocks[:, :BLOCK].view(torch.int8).float().mul_(scale).view(-1)


class LowRankMatrices:
    """The matrices of a bucket as products of two thin matrices.

    T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", algorithms 1 and 2, arXiv 1905.13727: one step of subspace iteration, starting
    from the subspace of the last step, instead of a decomposition. The rest of the bucket, and
    matrices that are too small to gain, are sent uncompressed.
    """

    def __init__(self, matrices: list[tuple[int, int, int]], numel: int, rank: int) -> None:
        """
        Args:
            matrices: (begin, rows, columns) in the bucket.
        """
        self._rank = rank
        self._matrices = [m for m in matrices if (m[1] + m[2]) * rank < m[1] * m[2] / 2]
        self._rest: list[tuple[int, int]] = []
        """[begin, end) of the ranges that are sent uncompressed."""
        end = 0
        for begin, rows, columns in self._matrices:
            self._rest.append((end, begin))
            end = begin + rows * columns
        self._rest = [(b, e) for b, e in [*self._rest, (end, numel)] if b < e]
        self._right: list[Tensor] = []
        """[columns, rank] of each matrix: the subspace of the last step."""
        self._left: list[Tensor] = []
        """[rows, rank], orthonormal: of this step."""
        self._own: Tensor | None = None

    def _views(self, values: Tensor) -> list[Tensor]:
        return [values[b : b + r * c].view(r, c) for b, r, c in self._matrices]

    def project(self, values: Tensor, multiple: int) -> Tensor:
        """Return the first message, flat [k]: M Q of each matrix, and the rest of the bucket.

        Args:
            multiple: zeros at the end make the length a multiple of it.
        """
        if not self._right:
            # Equal on all ranks: the seed depends on the position in the bucket alone.
            for offset, (_, _, columns) in enumerate(self._matrices):
                generator = torch.Generator().manual_seed(derive_seed("low rank", offset))
                start = torch.randn(columns, self._rank, generator=generator)
                self._right.append(start.to(values.device))
        parts = [(m @ q).view(-1) for m, q in zip(self._views(values), self._right, strict=True)]
        return _padded([*parts, *(values[b:e] for b, e in self._rest)], multiple)

    def project_back(self, values: Tensor, message: Tensor, multiple: int) -> Tensor:
        """Return the second message, flat [k]: M^T P of each matrix, P the orthonormal sum of M Q.

        Args:
            values: [n], the bucket. message: [k], the sums of `project`.
        """
        offset, parts = 0, []
        self._left = []
        for m in self._views(values):
            length = m.shape[0] * self._rank
            summed = message[offset : offset + length].view(m.shape[0], self._rank)
            # Non-finite values have no subspace; `rebuild` writes them to the result.
            left = torch.linalg.qr(summed.nan_to_num(0.0, 0.0, 0.0))[0]
            self._left.append(left)
            parts.append((m.T @ left).view(-1))
            offset += length
        joined = _padded([*parts, values.new_zeros(0)], multiple)
        self._own = joined.clone()
        return joined

    def rebuild(self, values: Tensor, message: Tensor, back: Tensor) -> None:
        """Write the sum: P (M^T P)^T of each matrix, and the rest of the bucket."""
        offset = 0
        for number, (m, left) in enumerate(zip(self._views(values), self._left, strict=True)):
            length = m.shape[1] * self._rank
            right = back[offset : offset + length].view(m.shape[1], self._rank)
            torch.mm(left, right.T, out=m)
            self._right[number] = right.nan_to_num(0.0, 0.0, 0.0)
            offset += length
        offset = sum(m.shape[0] for m in self._views(values)) * self._rank
        for begin, end in self._rest:
            values[begin:end].copy_(message[offset : offset + end - begin])
            offset += end - begin

    def keep_error(self, own: Tensor, error: Tensor) -> None:
        """Write the part of this rank's gradient `own` outside of the subspace to `error`."""
        assert self._own is not None
        error.zero_()
        offset = 0
        for m, e, left in zip(self._views(own), self._views(error), self._left, strict=True):
            length = m.shape[1] * self._rank
            right = self._own[offset : offset + length].view(m.shape[1], self._rank)
            torch.sub(m, left @ right.T, out=e)
            offset += length
        error.nan_to_num_(0.0, 0.0, 0.0)


def _padded(parts: list[Tensor], multiple: int) -> Tensor:
    joined = torch.cat(parts)
    return torch.nn.functional.pad(joined, (0, -joined.numel() % multiple))


def take_largest(values: Tensor, count: int) -> Tensor:
    """Set the `count` largest of fp32 [n] to zero, and return them as uint8 [8 count].

    Y. Lin et al., "Deep Gradient Compression", section 3, arXiv 1712.01887. Momentum belongs to the
    optimizer, which reads the sums: it is not corrected.

    All int32 indices precede the fp32 values. NaN counts as larger than infinity, and both are
    larger than all other values: non-finite values are sent.
    """
    indices = values.abs().topk(count, sorted=False).indices
    message = torch.empty(2, count, dtype=torch.int32, device=values.device)
    message[0].copy_(indices)
    message[1].copy_(values[indices].view(torch.int32))
    values[indices] = 0.0
    return message.view(-1).view(torch.uint8)
