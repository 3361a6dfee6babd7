"""Flat buffers: the main gradients of many parameters in one tensor, cut into buckets.

What an optimizer sees of a buffer is `spans()`: the parameters (or pieces of them) that this rank
updates, each with its values and its reduced gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import (
    Mesh,
    Transfer,
    finish_all,
    gather_parameters,
    reduce_gradients,
)
from megatron.core.distributed.sharding_arithmetic import BLOCK, BufferPlan, plan_buffer
from megatron.core.errors import ScheduleError


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """The part of a parameter that this rank updates."""

    name: str
    """Name of the parameter in its model chunk."""
    parameter: nn.Parameter
    begin: int
    end: int
    """[begin, end) of the flattened parameter."""
    values: Tensor
    """The model's values: the parameter itself if whole, else a 1-d view into it."""
    gradient: Tensor | None
    """The reduced gradient, of the shape of `values`; None: the optimizer reads `.grad`."""
    mesh: Mesh
    """The ranks that hold the other shards, and copies of this one."""

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the parameter."""
        return self.end - self.begin == self.parameter.numel()


@dataclass(frozen=True, eq=False)
class ShardSpan:
    """Shards that lie one after another in a flat gradient tensor."""

    gradients: Tensor
    """[k * BLOCK]; what lies between the shards is zero."""
    shards: list[ParameterShard]
    num_blocks: list[int]
    """Blocks of each shard, with the padding behind it; empty if the span is all padding."""


@dataclass(frozen=True)
class ReductionPolicy:
    """How the gradients of a buffer are summed over the ranks."""

    scale: float = 1.0
    """Factor on the sum."""
    average: bool = False
    """The collective averages."""
    check_finite: bool = False
    """Look for non-finite local gradients before they are mixed with others."""


class _Bucket:
    """One unit of communication: a range of the buffer and the parameters in it."""

    def __init__(self, number: int, begin: int, end: int, members: list[int]) -> None:
        self.number = number
        self.begin, self.end = begin, end
        self.members = members
        """Parameter numbers, in the order in which backward finishes them."""
        self.num_missing = len(members)
        self.is_launched = False


class GradientBuffer:
    """Main gradients (and with sharded state also values) of parameters of one dtype.

    Gradients are views: `parameter.main_grad`. Written under the main-gradient protocol of
    `megatron.core.param_meta`: the first writer of a step overwrites.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        mesh: Mesh,
        grad_dtype: torch.dtype,
        bucket_numel: int | None,
        policy: ReductionPolicy,
        apart: Collection[nn.Parameter] = (),
        tag: int = 0,
    ) -> None:
        """
        Args:
            parameters: (name, parameter) in forward order, of one dtype, on one device.
            bucket_numel: most elements of a bucket; None is one bucket.
            apart: parameters with buckets of their own (see `plan_buffer`).
            tag: first message tag of this buffer.
        """
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.mesh, self.policy, self._tag = mesh, policy, tag
        apart_ids = {id(p) for p in apart}
        self.plan: BufferPlan = plan_buffer(
            [p.numel() for p in self.parameters],
            bucket_numel=bucket_numel,
            num_shards=mesh.size,
            apart={i for i, p in enumerate(self.parameters) if id(p) in apart_ids},
        )
        first = self.parameters[0]
        self.gradients = torch.zeros(self.plan.numel, dtype=grad_dtype, device=first.device)
        self.values: Tensor | None = None
        """All parameters in one tensor, where shards of them are gathered."""
        if mesh.shard_size > 1:
            self._collect_values(first)
        for slot in self.plan.slots:
            parameter = self.parameters[slot.index]
            parameter.main_grad = self.gradients[slot.begin : slot.end].view(parameter.shape)
            parameter.main_grad_is_fresh = True

        self._buckets: list[_Bucket] = []
        self._buckets_of: list[list[_Bucket]] = [[] for _ in self.parameters]
        for number, (begin, end) in enumerate(self.plan.buckets):
            members = [slot.index for slot in self.plan.slots_in(begin, end)]
            bucket = _Bucket(number, begin, end, members)
            self._buckets.append(bucket)
            for index in members:
                self._buckets_of[index].append(bucket)
        self._num_launched = 0
        self._reductions: list[Transfer] = []
        self._gathers: dict[int, Transfer] = {}
        self.nonfinite: str | None = None
        """Name of the first parameter (in backward order) whose local gradient was not finite."""

    def _collect_values(self, first: nn.Parameter) -> None:
        self.values = torch.zeros(self.plan.numel, dtype=first.dtype, device=first.device)
        for slot in self.plan.slots:
            parameter = self.parameters[slot.index]
            place = self.values[slot.begin : slot.end].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    # Gradients ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Declare the gradients of the last step void; no memory is written."""
        self._finish_reductions()
        for parameter in self.parameters:
            parameter.main_grad_is_fresh = True
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.members)
            bucket.is_launched = False
        self._num_launched = 0
        self.nonfinite = None

    def mark_complete(self, index: int) -> None:
        """Note that the gradient of a parameter is final; reduce the buckets that are complete.

        Buckets are launched in their order, whatever the order of completion: ranks may use
        different parameters, but must send the same messages.
        """
        for bucket in self._buckets_of[index]:
            if bucket.is_launched or bucket.num_missing == 0:
                raise ScheduleError(
                    f"a second gradient of {self.names[index]} after its reduction had begun.",
                    rule="only the backward pass of the last micro batch may start the reduction",
                    fix="run the earlier micro batches inside no_sync()",
                )
            bucket.num_missing -= 1
        while self._num_launched < len(self._buckets):
            if self._buckets[self._num_launched].num_missing:
                break
            self._launch_next()

    def launch_remaining(self) -> None:
        """Start the reduction of all buckets that have not been started."""
        while self._num_launched < len(self._buckets):
            self._launch_next()

    def finish_reductions(self) -> None:
        """Start what has not been started, and wait for all: gradients are reduced afterwards."""
        self.launch_remaining()
        self._finish_reductions()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._num_launched]
        for index in bucket.members:
            self._fill_unwritten(index)
        if self.policy.check_finite and self.nonfinite is None:
            self.nonfinite = self._find_nonfinite(bucket)
        # One step for everything in flight: its messages had a bucket's time to arrive.
        for transfer in self._reductions:
            transfer.advance()
        self._reductions = [t for t in self._reductions if not t.is_finished]
        bucket.is_launched = True
        self._num_launched += 1
        transfer = reduce_gradients(
            self.gradients[bucket.begin : bucket.end],
            self.mesh,
            scale=self.policy.scale,
            average=self.policy.average,
            tag=self._tag + bucket.number,
        )
        if not transfer.is_finished:
            self._reductions.append(transfer)

    def _finish_reductions(self) -> None:
        finish_all(self._reductions)
        self._reductions = []

    def _fill_unwritten(self, index: int) -> None:
        parameter = self.parameters[index]
        if parameter.main_grad_is_fresh:
            parameter.main_grad.zero_()
            parameter.main_grad_is_fresh = False

    def _find_nonfinite(self, bucket: _Bucket) -> str | None:
        blocks = self.gradients[bucket.begin : bucket.end].view(-1, BLOCK)
        if bool(torch.linalg.vector_norm(blocks, dim=1).sum().isfinite()):
            return None
        # Rare: a NaN, an infinity, or a finite value whose square overflows. Look closely.
        for index in bucket.members:
            if not bool(self.parameters[index].main_grad.isfinite().all()):
                return self.names[index]
        return None

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the reduced gradients that this rank owns."""
        for owned in self.owned_gradients():
            owned.mul_(factor)

    def owned_gradients(self) -> list[Tensor]:
        """Return the flat tensors of reduced gradients of which this rank is an owner."""
        if self.mesh.shard_size == 1:
            return [self.gradients]
        return [self.mesh.own(self.gradients[b.begin : b.end]) for b in self._buckets]

    # Parameters -----------------------------------------------------------------------------

    def spans(self) -> list[ShardSpan]:
        """Return what this rank updates; the views stay valid."""
        if self.mesh.shard_size == 1:
            return [self._span(0, self.plan.numel)]
        rank, size = self.mesh.shard_rank, self.mesh.shard_size
        ranges = [self.plan.shard(number, rank, size) for number in range(self.num_buckets)]
        return [self._span(begin, end) for begin, end in ranges]

    def _span(self, begin: int, end: int) -> ShardSpan:
        pieces = self.plan.pieces(begin, end)
        offsets = [piece.offset for piece in pieces]
        assert offsets[:1] in ([], [begin]), (offsets, begin, end)
        # Padding between a piece and the next one is zero and counts to the former.
        num_blocks = [
            (following - offset) // BLOCK
            for offset, following in zip(offsets, [*offsets[1:], end], strict=False)
        ]
        shards = []
        for piece in pieces:
            parameter = self.parameters[piece.index]
            length = piece.end - piece.begin
            gradient = self.gradients[piece.offset : piece.offset + length]
            if length == parameter.numel():
                values, gradient = parameter, gradient.view(parameter.shape)
            else:
                values = parameter.data.view(-1)[piece.begin : piece.end]
            name = self.names[piece.index]
            shards.append(
                ParameterShard(name, parameter, piece.begin, piece.end, values, gradient, self.mesh)
            )
        return ShardSpan(self.gradients[begin:end], shards, num_blocks)

    def start_gathers(self) -> None:
        """Start collecting the parameters' shards from their owners, first layers first."""
        if self.values is None:
            return
        self.finish_gathers()
        for bucket in reversed(self._buckets):
            self._gathers[bucket.number] = gather_parameters(
                self.values[bucket.begin : bucket.end], self.mesh, tag=self._tag + bucket.number
            )

    def finish_gathers(self, indices: Collection[int] | None = None) -> None:
        """Wait until parameters are whole again: those numbered `indices`, or all."""
        if not self._gathers:
            return
        if indices is None:
            numbers = list(self._gathers)
        else:
            numbers = [b.number for index in indices for b in self._buckets_of[index]]
        for number in numbers:
            transfer = self._gathers.pop(number, None)
            if transfer is not None:
                transfer.finish()
