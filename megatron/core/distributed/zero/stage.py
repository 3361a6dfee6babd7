"""Base of the ZeRO stages: buckets of gradients that are reduced in order, a few at a time.

A stage decides where gradients and parameters are stored, and when parameters are gathered:

    stage 0, 1 (`stage1`)    full gradients, full parameters; stage 1 updates a shard of them
    stage 2 (`stage2`)       a shard of the gradients, full parameters
    stage 3 (`stage3`)       a shard of both
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.compression import CompressedReduction, TrafficCount
from megatron.core.distributed.distributed_data_parallel_config import DataParallelFlags
from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.distributed.zero.gathered_params import GatheredParams
from megatron.core.distributed.zero.sharded_params import ShardedParams
from megatron.core.transport.transport import bucket_transport, has_tags
from megatron.core.transport.work import AnyWork, Work, wait_all


@dataclass(frozen=True)
class ReductionPolicy:
    """How gradients are summed over the ranks."""

    scale: float = 1.0
    """Factor on the sum."""
    average: bool = False
    """The collective averages over the ranks if the backend can; then `scale` lacks 1/size."""
    check_finite: bool = False
    """Check for non-finite local gradients before they are summed with other ranks' gradients."""
    compression: DataParallelFlags | None = None
    """Settings of the compression of messages; None sends them as they are."""


class ZeroStage(ABC):
    """Gradients and parameters of one layout."""

    max_in_flight = 2
    """Buckets in reduction besides the newest one: bounds the memory that only they need."""
    shards_parameters = False
    """Parameters are whole only while they are used."""
    defers_gradients = False
    """Gradients are registered after deferred weight gradients are computed."""
    params: GatheredParams | ShardedParams

    def __init__(self, flat: FlatParams, policy: ReductionPolicy) -> None:
        self.flat, self._policy = flat, policy
        self.traffic = TrafficCount()
        """Bytes sent for gradients; counted with compression only."""
        self.nonfinite: str | None = None
        """Name of the first parameter (in backward order) whose local gradient was not finite."""
        self.checks_finite = policy.check_finite
        """Check for such a parameter. May be changed between steps."""
        self._compressions = [self._compression_of(bucket) for bucket in flat.buckets]
        self._num_launched = 0
        self._in_flight: list[AnyWork] = []

    def _compression_of(self, bucket: Bucket) -> CompressedReduction | None:
        """Return how the bucket's gradients are compressed, and find the matrices in it."""
        settings, flat = self._policy.compression, self.flat
        if settings is None or flat.mesh.size == 1:
            return None
        matrices = []
        for piece in flat.plan.pieces(bucket.begin, bucket.end):
            parameter = flat.parameters[piece.index]
            if parameter.dim() < 2 or not parameter.numel():
                continue
            columns = parameter.numel() // parameter.shape[0]
            # A bucket may begin or end inside a row: that part of the row is not in a matrix.
            first, last = -(-piece.begin // columns), piece.end // columns
            if first < last:
                begin = piece.offset - bucket.begin + first * columns - piece.begin
                matrices.append((begin, last - first, columns))
        return CompressedReduction(settings, matrices, bucket.end - bucket.begin, self.traffic)

    @abstractmethod
    def register_grad_ready(self, index: int, is_final: bool) -> None:
        """Move the gradient of a parameter out of `.grad`, if backward left one there.

        Args:
            is_final: no later micro batch adds to the gradient: complete buckets may be reduced.
        """

    def register_grad_deferred(self, index: int) -> None:  # noqa: B027
        """Note that backward has used a parameter whose gradient is registered later."""

    def end_backward(self) -> None:  # noqa: B027
        """Note that a backward pass of the model chunk has ended."""

    @abstractmethod
    def finish_reductions(self) -> None:
        """Reduce the remaining buckets, and wait.

        Afterwards the owned gradients are final, and the own shards of parameters may change.
        """

    @abstractmethod
    def owned_gradients(self) -> list[Tensor]:
        """Return the flat tensors of reduced gradients that this rank owns."""

    @abstractmethod
    def spans(self) -> list[ShardSpan]:
        """Return the spans that this rank updates; the views stay valid."""

    def own_shards(self) -> list[Tensor]:
        """Return the parameter shards [n] that only this rank holds, for the caller to change."""
        return []

    # The order of reductions ----------------------------------------------------------------

    @abstractmethod
    def _start_reduction(self, bucket: Bucket) -> AnyWork:
        """Start to reduce the gradients of a bucket."""

    def _reduce(
        self, bucket: Bucket, gradients: Tensor, into: Tensor | None = None
    ) -> Work[Tensor]:
        """Check the local gradients [n] of a bucket, and reduce them; see `reduce_bucket`."""
        self._note_nonfinite(bucket, gradients)
        return reduce_bucket(
            gradients,
            self.flat.mesh,
            self._policy,
            tag=self.flat.tag + bucket.number,
            compression=self._compressions[bucket.number],
            into=into,
        )

    def begin_step(self) -> None:
        """Discard the gradients of the last step; no memory is written."""
        self._wait_for_reductions()
        self.nonfinite = None
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        """Wait for the gradients of all buckets again."""
        for bucket in self.flat.buckets:
            bucket.reset()
        self._num_launched = 0

    def _mark_grad_ready(self, bucket: Bucket) -> None:
        """Note that a gradient in a bucket is complete; reduce complete buckets.

        Buckets are launched in their order, whatever the order of completion: ranks may use
        different parameters, but must send the same messages.
        """
        bucket.num_pending -= 1
        while self._num_launched < len(self.flat.buckets):
            if self.flat.buckets[self._num_launched].num_pending:
                break
            self._launch_next()

    def launch_remaining(self) -> None:
        """Start the reduction of all buckets that have not been started."""
        while self._num_launched < len(self.flat.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.flat.buckets[self._num_launched]
        bucket.is_launched = True
        self._num_launched += 1
        if bucket.reduction is not None:
            bucket.reduction.wait()  # both would use the bucket's message tag
        work = bucket.reduction = self._start_reduction(bucket)
        # Waiting here would synchronise the ranks after every bucket and add up their delays.
        for earlier in self._in_flight:
            earlier.poll()
        while len(self._in_flight) >= self.max_in_flight and not self._in_flight[0].is_completed():
            self._in_flight[0].advance()
        self._in_flight = [w for w in [*self._in_flight, work] if not w.is_completed()]

    def _wait_for_reductions(self) -> None:
        wait_all(self._in_flight)
        self._in_flight = []

    def _note_nonfinite(self, bucket: Bucket, gradients: Tensor) -> None:
        """Find a parameter of the bucket whose local gradient is not finite."""
        if not self.checks_finite or self.nonfinite is not None:
            return
        norms = torch.linalg.vector_norm(gradients.view(-1, BLOCK), dim=1)
        if bool(norms.sum().isfinite()):
            return
        # Rare: a NaN, an infinity, or a finite value whose square overflows.
        for piece in self.flat.plan.pieces(bucket.begin, bucket.end):
            begin = piece.offset - bucket.begin
            values = gradients[begin : begin + piece.end - piece.begin]
            if not bool(values.isfinite().all()):
                self.nonfinite = self.flat.names[piece.index]
                return


def reduce_bucket(
    bucket: Tensor,
    mesh: Mesh,
    policy: ReductionPolicy,
    *,
    tag: int,
    compression: CompressedReduction | None = None,
    into: Tensor | None = None,
) -> Work[Tensor]:
    """Sum a bucket of gradients over the mesh.

    Args:
        bucket: [n], n divisible by the mesh size. Afterwards only the sums in it are defined.
        tag: separates the messages of different buckets.
        compression: of this bucket, step after step.
        into: [n / shard size], memory for the sums; used if that saves a copy.
    Returns:
        the sum of this rank's shard over all ranks: `mesh.own(bucket)` (without a shard axis the
        whole bucket), or `into`.
    Communication:
        a reduce-scatter on `mesh.shard`, then an all-reduce of the own shard on
        `mesh.replicate`; axes of size 1 cost nothing.
    """
    groups = [axis for axis in (mesh.shard, mesh.replicate) if axis.size() > 1]
    sums_in_order = all(has_tags(group) for group in groups)
    is_compressed = compression is not None and compression.is_on(bucket, mesh)
    factor = policy.scale
    if policy.average and (sums_in_order or is_compressed):
        factor /= mesh.size
    if compression is not None and is_compressed:
        return compression.reduce(bucket, mesh, factor, tag)
    if not groups:
        if factor != 1.0:
            bucket.mul_(factor)
        return Work.completed(bucket)
    is_in_order = len(groups) == 1  # ranks reach a second step in different orders
    start = partial(bucket_transport, tag=tag, averages=policy.average, is_in_order=is_in_order)
    if mesh.shard_size == 1:
        return start(mesh.replicate).all_reduce(bucket, factor)
    own = mesh.own(bucket)
    if mesh.replicate_size == 1:
        return start(mesh.shard).reduce_scatter(bucket, factor, out=own if into is None else into)
    # The factor is applied with the last sum. A native sum scales before it adds: with the first.
    first, last = (1.0, factor) if sums_in_order else (factor, 1.0)
    reduction = start(mesh.shard).reduce_scatter(bucket, first, out=own)
    return reduction.then(lambda own: start(mesh.replicate).all_reduce(own, last))
