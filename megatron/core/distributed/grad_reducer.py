"""When and in which order the buckets of gradients are reduced, wherever their memory is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.communication import reduce_gradients
from megatron.core.distributed.compression.reduction import (
    CompressedReduction,
    CompressionSettings,
    TrafficCount,
)
from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.transport.comm_buffer import BucketSlot
from megatron.core.transport.work import AnyWork, Steps, wait_all

MAX_IN_FLIGHT = 2
"""Buckets in reduction beside the newest one: bounds the memory that only they need."""


@dataclass(frozen=True)
class ReductionPolicy:
    """How gradients are summed over the ranks."""

    scale: float = 1.0
    """Factor on the sum."""
    average: bool = False
    """The collective averages."""
    check_finite: bool = False
    """Look for non-finite local gradients before they are mixed with others."""
    compression: CompressionSettings = CompressionSettings()
    """In how many bytes they travel."""


class GradReducer:
    """Launches the reductions of a layout's buckets, and keeps a few of them in flight."""

    def __init__(
        self,
        flat: FlatParams,
        policy: ReductionPolicy,
        start: Callable[[Bucket], AnyWork],
        *,
        max_in_flight: Callable[[], int] = lambda: MAX_IN_FLIGHT,
    ) -> None:
        """
        Args:
            start: starts the reduction of a bucket.
            max_in_flight: how many may be in reduction beside the newest one.
        """
        self._flat, self._policy = flat, policy
        self._start, self._max_in_flight = start, max_in_flight
        self.traffic = TrafficCount()
        """Bytes sent for gradients; counted with compression only."""
        self.nonfinite: str | None = None
        """Name of the first parameter (in backward order) whose local gradient was not finite."""
        self.checks_finite = policy.check_finite
        """Look for such a parameter. May be changed between steps."""
        self._compressions = [self._compression_of(bucket) for bucket in flat.buckets]
        self._num_launched = 0
        self._in_flight: list[AnyWork] = []

    def _compression_of(self, bucket: Bucket) -> CompressedReduction | None:
        """Return how the bucket's gradients are compressed, and find the matrices in it."""
        settings, flat = self._policy.compression, self._flat
        if settings.kind == "none" or flat.mesh.size == 1:
            return None
        matrices = []
        for piece in flat.plan.pieces(bucket.begin, bucket.end):
            parameter = flat.parameters[piece.index]
            if parameter.dim() < 2 or not parameter.numel():
                continue
            columns = parameter.numel() // parameter.shape[0]
            # A bucket may begin or end inside of a row: what is left there is no matrix.
            first, last = -(-piece.begin // columns), piece.end // columns
            if first < last:
                begin = piece.offset - bucket.begin + first * columns - piece.begin
                matrices.append((begin, last - first, columns))
        return CompressedReduction(settings, matrices, bucket.end - bucket.begin, self.traffic)

    def steps(
        self,
        bucket: Bucket,
        gradients: Tensor,
        slot: BucketSlot | None,
        into: Tensor | None = None,
    ) -> Steps[Tensor]:
        """Reduce the gradients [n] of a bucket by the policy; see `reduce_gradients`."""
        return reduce_gradients(
            gradients,
            self._flat.mesh,
            scale=self._policy.scale,
            tag=self._flat.tag + bucket.number,
            average=self._policy.average,
            into=into,
            compression=self._compressions[bucket.number],
            slot=slot,
        )

    def begin_step(self) -> None:
        """Wait for what is in flight, and forget the last step."""
        self.wait()
        self.nonfinite = None
        self.begin_backward()

    def begin_backward(self) -> None:
        """Wait for the gradients of all buckets again."""
        for bucket in self._flat.buckets:
            bucket.reset()
        self._num_launched = 0

    def mark_grad_ready(self, bucket: Bucket) -> None:
        """Note that a gradient in a bucket is complete; reduce the buckets that are.

        Buckets are launched in their order, whatever the order of completion: ranks may use
        different parameters, but must send the same messages.
        """
        bucket.num_pending -= 1
        while self._num_launched < len(self._flat.buckets):
            if self._flat.buckets[self._num_launched].num_pending:
                break
            self._launch_next()

    def launch_remaining(self) -> None:
        """Start the reduction of all buckets that have not been started."""
        while self._num_launched < len(self._flat.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._flat.buckets[self._num_launched]
        bucket.is_launched = True
        self._num_launched += 1
        if bucket.reduction is not None:
            # Others read a bucket where its owner shows it: one at a time.
            bucket.reduction.wait()
        work = bucket.reduction = self._start(bucket)
        # Waiting here would tie the ranks together bucket by bucket, and add up their delays.
        for earlier in self._in_flight:
            earlier.poll()
        most = self._max_in_flight()
        while len(self._in_flight) >= most and not self._in_flight[0].is_completed():
            self._in_flight[0].advance()
        self._in_flight = [w for w in [*self._in_flight, work] if not w.is_completed()]

    def wait(self) -> None:
        """Wait for what is in flight."""
        wait_all(self._in_flight)
        self._in_flight = []

    def note_nonfinite(self, bucket: Bucket, gradients: Tensor) -> None:
        """Look for a parameter of the bucket whose local gradient is not finite."""
        if not self.checks_finite or self.nonfinite is not None:
            return
        norms = torch.linalg.vector_norm(gradients.view(-1, BLOCK), dim=1)
        if bool(norms.sum().isfinite()):
            return
        # Rare: a NaN, an infinity, or a finite value whose square overflows. Look closely.
        for piece in self._flat.plan.pieces(bucket.begin, bucket.end):
            begin = piece.offset - bucket.begin
            values = gradients[begin : begin + piece.end - piece.begin]
            if not bool(values.isfinite().all()):
                self.nonfinite = self._flat.names[piece.index]
                return
