"""Parameters of one dtype laid out in a flat buffer whose buckets travel one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import (
    Mesh,
    gather_parameters,
    reduce_gradients,
)
from megatron.core.distributed.compressed_reduction import (
    CompressedReduction,
    CompressionSettings,
    TrafficCount,
)
from megatron.core.distributed.parameter_shard import ParameterShard, ShardSpan
from megatron.core.distributed.sharding_arithmetic import BLOCK, BufferPlan, Piece, plan_buffer
from megatron.core.transport.shm.shared_buffer import SharedBuffer
from megatron.core.transport.shm.shm_bucket_transport import SharedSlot
from megatron.core.transport.work import Steps, Work, wait_all


@dataclass(frozen=True)
class ReductionPolicy:
    """How the gradients of a buffer are summed over the ranks."""

    scale: float = 1.0
    """Factor on the sum."""
    average: bool = False
    """The collective averages."""
    check_finite: bool = False
    """Look for non-finite local gradients before they are mixed with others."""
    compression: CompressionSettings = CompressionSettings()
    """In how many bytes they travel."""


class Bucket:
    """One unit of communication: a range of the buffer and the parameters in it."""

    def __init__(self, number: int, begin: int, end: int, members: list[int]) -> None:
        self.number = number
        self.begin, self.end = begin, end
        self.members = members
        """Parameter numbers, in the order in which backward finishes them."""
        self.is_launched = False
        self.num_missing = len(members)
        """Members whose gradient has not arrived."""
        self.reduction: Work[Tensor] | None = None
        """The last one, which may still run when another backward pass has begun."""

    def reset(self) -> None:
        """Wait for all members again."""
        self.is_launched = False
        self.num_missing = len(self.members)


class BucketedBuffer(ABC):
    """The layout of a set of parameters, the order of their reductions, and their gathers.

    Subclasses decide where gradients lie.
    """

    max_in_flight = 2
    """Buckets in reduction beside the newest one: bounds the memory that only they need."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        mesh: Mesh,
        grad_dtype: torch.dtype,
        bucket_numel: int | None,
        policy: ReductionPolicy,
        apart: Collection[nn.Parameter] = (),
        apart_numel: int | None = None,
        units: Sequence[int] | None = None,
        uncut: Collection[int] = (),
        granule: int = BLOCK,
        tag: int = 0,
    ) -> None:
        """
        Args:
            parameters: (name, parameter) in forward order, of one dtype, on one device.
            bucket_numel: most elements of a bucket; None is one bucket.
            apart: parameters with buckets of their own (see `plan_buffer`).
            apart_numel: most elements of a bucket of those.
            units: number of each parameter's unit, none of which shares a bucket with another.
            uncut: units that are one bucket.
            granule: elements that a shard is a multiple of.
            tag: first message tag of this buffer.
        """
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.mesh, self.policy, self.grad_dtype, self._tag = mesh, policy, grad_dtype, tag
        self.device = self.parameters[0].device
        apart_ids = {id(p) for p in apart}
        self.plan: BufferPlan = plan_buffer(
            [p.numel() for p in self.parameters],
            bucket_numel=bucket_numel,
            num_shards=mesh.size,
            apart={i for i, p in enumerate(self.parameters) if id(p) in apart_ids},
            apart_numel=apart_numel,
            units=units,
            uncut=uncut,
            granule=granule,
        )
        self.values: Tensor | None = None
        """All parameters in one tensor, where shards of them are gathered."""
        self._value_memory: SharedBuffer | None = None
        self._gradient_memory: SharedBuffer | None = None
        if mesh.shard_size > 1:
            self._collect_values()
        self.buckets: list[Bucket] = []
        self._buckets_of: list[list[Bucket]] = [[] for _ in self.parameters]
        for number, (begin, end) in enumerate(self.plan.buckets):
            members = [slot.index for slot in self.plan.slots_in(begin, end)]
            bucket = Bucket(number, begin, end, members)
            self.buckets.append(bucket)
            for index in members:
                self._buckets_of[index].append(bucket)
        self.traffic = TrafficCount()
        """Bytes sent for gradients; counted with compression only."""
        self._compressions = [self._compression_of(bucket) for bucket in self.buckets]
        self._num_launched = 0
        self._reductions: list[Work] = []
        self._gathers: dict[int, Work] = {}
        self.nonfinite: str | None = None
        """Name of the first parameter (in backward order) whose local gradient was not finite."""

    def _compression_of(self, bucket: Bucket) -> CompressedReduction | None:
        """Return how the bucket's gradients are compressed, and find the matrices in it."""
        settings = self.policy.compression
        if settings.kind == "none" or self.mesh.size == 1:
            return None
        matrices = []
        for piece in self.plan.pieces(bucket.begin, bucket.end):
            parameter = self.parameters[piece.index]
            if parameter.dim() < 2 or not parameter.numel():
                continue
            columns = parameter.numel() // parameter.shape[0]
            # A bucket may begin or end inside of a row: what is left there is no matrix.
            first, last = -(-piece.begin // columns), piece.end // columns
            if first < last:
                begin = piece.offset - bucket.begin + first * columns - piece.begin
                matrices.append((begin, last - first, columns))
        return CompressedReduction(settings, matrices, bucket.end - bucket.begin, self.traffic)

    def _collect_values(self) -> None:
        dtype = self.parameters[0].dtype
        self.values, self._value_memory = self._readable_zeros(self.plan.numel, dtype)
        for slot in self.plan.slots:
            parameter = self.parameters[slot.index]
            place = self.values[slot.begin : slot.end].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place

    def _readable_zeros(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, SharedBuffer | None]:
        """Return zeros that the other ranks of this machine can read, with a word per bucket."""
        memory = self._readable_memory(numel * dtype.itemsize)
        if memory is None:
            return torch.zeros(numel, dtype=dtype, device=self.device), None
        return memory.tensor(dtype, 0, numel), memory

    def _readable_memory(self, num_bytes: int) -> SharedBuffer | None:
        """Return memory for a buffer of which ranks have copies or shards; None elsewhere."""
        if self.device.type != "cpu" or self.mesh.size == 1:
            return None
        return SharedBuffer(num_bytes, self.plan.num_buckets)

    # Gradients ------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self) -> None:
        """Declare the gradients of the last step void."""

    @abstractmethod
    def gradient_arrived(self, index: int, is_final: bool) -> None:
        """Take over what backward left in `.grad` of a parameter, if anything.

        Args:
            is_final: no later micro batch adds to it: buckets that are complete may be reduced.
        """

    @abstractmethod
    def end_backward(self) -> None:
        """Learn that a backward pass of the whole model chunk is over."""

    @abstractmethod
    def finish_reductions(self) -> None:
        """Reduce what is not reduced yet, and wait: the owned gradients are final afterwards."""

    @abstractmethod
    def owned_gradients(self) -> list[Tensor]:
        """Return the flat tensors of reduced gradients of which this rank is an owner."""

    @abstractmethod
    def spans(self) -> list[ShardSpan]:
        """Return what this rank updates; the views stay valid."""

    @abstractmethod
    def _reduction_of(self, bucket: Bucket) -> Work:
        """Start the reduction of a bucket."""

    def _reduction_steps(
        self, bucket: Bucket, gradients: Tensor, into: Tensor | None = None
    ) -> Steps[Tensor]:
        """Reduce the gradients of a bucket by the policy; see `reduce_gradients`."""
        return reduce_gradients(
            gradients,
            self.mesh,
            scale=self.policy.scale,
            tag=self._tag + bucket.number,
            average=self.policy.average,
            into=into,
            compression=self._compressions[bucket.number],
            # Whoever shards state wants little in memory; the others want speed.
            slot=self._slot(
                self._gradient_memory, bucket.number, keeps_pages=self.mesh.shard_size == 1
            ),
        )

    @staticmethod
    def _slot(
        memory: SharedBuffer | None, number: int, *, keeps_pages: bool = False
    ) -> SharedSlot | None:
        return None if memory is None else SharedSlot(memory, number, keeps_pages)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the reduced gradients that this rank owns."""
        for owned in self.owned_gradients():
            owned.mul_(factor)

    def launch_remaining(self) -> None:
        """Start the reduction of all buckets that have not been started."""
        while self._num_launched < len(self.buckets):
            self._launch_next()

    def _mark_arrived(self, bucket: Bucket) -> None:
        """Note that a gradient in a bucket is complete; reduce the buckets that are.

        Buckets are launched in their order, whatever the order of completion: ranks may use
        different parameters, but must send the same messages.
        """
        bucket.num_missing -= 1
        while self._num_launched < len(self.buckets):
            if self.buckets[self._num_launched].num_missing:
                break
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._num_launched]
        bucket.is_launched = True
        self._num_launched += 1
        if bucket.reduction is not None:
            # Others read a bucket where its owner shows it: one at a time.
            bucket.reduction.wait()
        work = bucket.reduction = self._reduction_of(bucket)
        # Waiting here would tie the ranks together bucket by bucket, and add up their delays.
        for earlier in self._reductions:
            earlier.poll()
        most = self._most_in_flight()
        while len(self._reductions) >= most and not self._reductions[0].is_completed():
            self._reductions[0].advance()
        self._reductions = [t for t in [*self._reductions, work] if not t.is_completed()]

    def _most_in_flight(self) -> int:
        """Return how many buckets may be in reduction beside the newest one."""
        return self.max_in_flight

    def _finish_transfers(self) -> None:
        wait_all(self._reductions)
        self._reductions = []

    def _reset_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._num_launched = 0

    def _note_nonfinite(self, bucket: Bucket, gradients: Tensor) -> None:
        """Look for a parameter of the bucket whose local gradient is not finite."""
        if not self.policy.check_finite or self.nonfinite is not None:
            return
        norms = torch.linalg.vector_norm(gradients.view(-1, BLOCK), dim=1)
        if bool(norms.sum().isfinite()):
            return
        # Rare: a NaN, an infinity, or a finite value whose square overflows. Look closely.
        for piece in self.plan.pieces(bucket.begin, bucket.end):
            begin = piece.offset - bucket.begin
            values = gradients[begin : begin + piece.end - piece.begin]
            if not bool(values.isfinite().all()):
                self.nonfinite = self.names[piece.index]
                return

    def _span(self, begin: int, end: int, gradients: Tensor) -> ShardSpan:
        """Describe [begin, end) of the buffer, whose gradients lie in `gradients`."""
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
            values = self._values_of(piece)
            gradient = gradients[piece.offset - begin :][: values.numel()].view(values.shape)
            name = self.names[piece.index]
            shards.append(
                ParameterShard(name, parameter, piece.begin, piece.end, values, gradient, self.mesh)
            )
        return ShardSpan(gradients, shards, num_blocks)

    def _values_of(self, piece: Piece) -> Tensor:
        """Return the model's values of a piece: the parameter itself, or a 1-d view into it."""
        parameter = self.parameters[piece.index]
        if piece.end - piece.begin == parameter.numel():
            return parameter
        return parameter.data.view(-1)[piece.begin : piece.end]

    # Parameters -----------------------------------------------------------------------------

    def start_gathers(self) -> None:
        """Start collecting the parameters' shards from their owners, first layers first."""
        if self.values is None:
            return
        self.finish_gathers()
        for bucket in reversed(self.buckets):
            self._gathers[bucket.number] = gather_parameters(
                self.values[bucket.begin : bucket.end],
                self.mesh,
                tag=self._tag + bucket.number,
                slot=self._slot(self._value_memory, bucket.number),
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
            work = self._gathers.pop(number, None)
            if work is not None:
                work.wait()

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the own shards of parameters any more."""
        self.finish_gathers()
        if self._value_memory is not None:
            self._value_memory.wait_for_readers()
