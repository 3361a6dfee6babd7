"""Updated parameters that are gathered bucket by bucket: ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.distributed.communication import gather_parameters
from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.sharding_arithmetic import Piece
from megatron.core.low_precision.quantized_linear import QuantizedLinear, largest_magnitude
from megatron.core.low_precision.scaling import scaled_cast
from megatron.core.offload.device_copies import AsyncFetch, Copy, DeviceCopies, device_copies
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.transport import has_tags
from megatron.core.transport.work import AnyWork, Work


class GatheredParams:
    """The values of all parameters of a layout; nothing if every rank updates all of them."""

    def __init__(self, flat: FlatParams, *, is_updated_on_host: bool = False) -> None:
        """
        Args:
            is_updated_on_host: own shards are copied from host memory before they are gathered.
        """
        self._flat, self.values_of = flat, flat.values_of
        self._gathers: dict[int, AnyWork] = {}
        self._buffer: Tensor | None = None
        self.fetches: Sequence[AsyncFetch | None] = [None] * len(flat.buckets)
        """Copies of the own shard of each bucket from host memory."""
        if is_updated_on_host:
            copies = device_copies(flat.device)
            self.fetches = [AsyncFetch(copies) for _ in flat.buckets]
        if flat.mesh.shard_size == 1:
            return
        self._buffer = torch.zeros(flat.plan.numel, dtype=flat.dtype, device=flat.device)
        for slot in flat.plan.slots:
            parameter = flat.parameters[slot.index]
            buffer = self._buffer[slot.begin : slot.end].view(parameter.shape)
            buffer.copy_(parameter.detach())
            parameter.data = buffer

    def start_gathers(self) -> None:
        """Start to gather the shards of all ranks, first layers first."""
        self.finish_gathers()
        for bucket in reversed(self._flat.buckets):
            if self._buffer is not None or self.fetches[bucket.number] is not None:
                self._gathers[bucket.number] = self._gather(bucket)

    def _gather(self, bucket: Bucket) -> AnyWork:
        """Gather a bucket after the own shard has been copied from host memory."""
        fetch, buffer, mesh = self.fetches[bucket.number], self._buffer, self._flat.mesh
        copies = [] if fetch is None else fetch.take()
        if buffer is None:
            return Work.of(copies, None)

        def gather() -> Work[Tensor]:
            tag = self._flat.tag + bucket.number
            return gather_parameters(buffer[bucket.begin : bucket.end], mesh, tag=tag)

        return gather() if fetch is None else start_after(copies, fetch.copies, mesh.shard, gather)

    def finish_gathers(self, indices: Collection[int] | None = None) -> None:
        """Wait until the parameters numbered `indices`, or all parameters, are whole again."""
        if not self._gathers:
            return
        if indices is None:
            numbers = list(self._gathers)
        else:
            numbers = [b.number for index in indices for b in self._flat.buckets_of[index]]
        for number in numbers:
            work = self._gathers.pop(number, None)
            if work is not None:
                work.wait()

    def prepare_update(self) -> None:
        """Wait for all gathers: afterwards the own shards may change."""
        self.finish_gathers()


class QuantizedParams(GatheredParams):
    """Weights that are gathered in E4M3: one byte per element, and one scale per tensor.

    An owner scales and rounds its piece of a weight as the products of the layer would, with the
    scale of the whole tensor, and sends the codes. Each rank stores the decoded values in the
    model's dtype. The products scale and round them to the same codes again, because bf16 has more
    bits: a step computes the same as with parameters that are gathered in bf16.

    The largest magnitudes are taken over the unrounded weights of all pieces; the history of
    delayed scaling reads them here.

    Args:
        quantized: products of each parameter of the layout.
    Communication:
        one all-reduce of a number for each parameter over the shards and over the tensor-parallel
        ranks, then all-gathers of one byte per element.
    """

    def __init__(self, flat: FlatParams, quantized: Sequence[QuantizedLinear]) -> None:
        super().__init__(flat)
        self._quantized = list(quantized)
        self._codes = torch.zeros(flat.plan.numel, dtype=torch.uint8, device=flat.device)
        # The last number is positive if the weights of any rank have changed.
        self._amaxes = torch.zeros(len(quantized) + 1, device=flat.device)
        self._factors = torch.ones(len(quantized), device=flat.device)

    def start_gathers(self) -> None:
        """Round the own shards, and start to gather the codes of all ranks, first layers first."""
        self.finish_gathers()
        self._round_own()
        super().start_gathers()

    def _own_pieces(self) -> Iterable[tuple[Piece, Tensor, Tensor]]:
        """Yield each piece that this rank owns, its values and its codes, 1-d each."""
        for begin, end in self._flat.shard_ranges():
            for piece in self._flat.plan.pieces(begin, end):
                yield piece, *self._views(piece)

    def _views(self, piece: Piece) -> tuple[Tensor, Tensor]:
        values = self._flat.parameters[piece.index].data.view(-1)[piece.begin : piece.end]
        codes = self._codes[piece.offset : piece.offset + piece.end - piece.begin]
        return values, codes

    @torch.no_grad()
    def _round_own(self) -> None:
        """Compute the scale of each weight, and write the codes of the own pieces."""
        found = torch.zeros_like(self._amaxes)
        for piece, values, codes in self._own_pieces():
            amax = largest_magnitude(values).float()
            found[piece.index] = torch.maximum(found[piece.index], amax)
            same = self._decode(codes, piece.index).eq(values).all()
            found[-1] = torch.maximum(found[-1], same.logical_not().float())
        for group in (self._flat.mesh.shard, self._quantized[0].tp):
            torch_collectives.all_reduce(found, group, ReduceOp.MAX)
        # Unchanged rounded weights keep the amaxes of the unrounded weights.
        self._amaxes = torch.where(found[-1] > 0, found, self._amaxes)
        amaxes = zip(self._quantized, self._amaxes[:-1], strict=True)
        scale = torch.stack([quantized.scale_of_weight(amax) for quantized, amax in amaxes])
        self._factors = 1.0 / scale
        for piece, values, codes in self._own_pieces():
            rounded = scaled_cast(values, scale[piece.index], torch.float8_e4m3fn)
            codes.copy_(rounded.view(torch.uint8))

    def _decode(self, codes: Tensor, index: int) -> Tensor:
        """Return the values of codes [n] of a parameter, in its dtype."""
        numbers = codes.view(torch.float8_e4m3fn).float() * self._factors[index]
        return numbers.to(self._flat.dtype)

    def _gather(self, bucket: Bucket) -> AnyWork:
        codes, tag = self._codes[bucket.begin : bucket.end], self._flat.tag + bucket.number

        def decode(_: Tensor) -> None:
            for piece in self._flat.plan.pieces(bucket.begin, bucket.end):
                values, codes = self._views(piece)
                values.copy_(self._decode(codes, piece.index))

        return gather_parameters(codes, self._flat.mesh, tag=tag).then(decode)


def start_after(
    fetched: Sequence[Copy],
    copies: DeviceCopies,
    group: Group,
    gather: Callable[[], Work[Tensor]],
) -> Work[Tensor]:
    """Start `gather` of a bucket [n] over `group` after the copies `fetched` have arrived."""
    if not fetched:
        return gather()
    if has_tags(group) or group.size() == 1:
        return Work.of(fetched, None).then(lambda _: gather())
    # Without tags collectives must start in the same order on all ranks: here.
    with copies.after(fetched):
        return gather()


def gathered_params(flat: FlatParams, *, is_updated_on_host: bool = False) -> GatheredParams:
    """Return how the updated parameters of a layout are gathered."""
    if flat.quantized and flat.mesh.shard_size > 1:
        return QuantizedParams(flat, flat.quantized)
    return GatheredParams(flat, is_updated_on_host=is_updated_on_host)
