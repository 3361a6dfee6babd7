"""Parameters that are gathered in E4M3, one byte per element, with one scale per tensor.

The owner of a piece of a weight scales and rounds the piece as the products of the layer do, with
the scale of the whole tensor, and sends the codes. Each rank stores the rounded numbers in bf16.
The products round them to the same codes again, because bf16 has more bits. So a step computes the
same numbers as with parameters that are gathered in bf16.

The amaxes are taken over all pieces of the unrounded weights; the history of delayed scaling uses
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.distributed.communication import gather_parameters
from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.sharding_arithmetic import Piece
from megatron.core.distributed.zero.gathered_params import GatheredParams
from megatron.core.low_precision.quantized_linear import QuantizedLinear, largest_magnitude
from megatron.core.low_precision.scaling import scaled_cast
from megatron.core.transport import backend
from megatron.core.transport.work import Steps, Work


class QuantizedParams(GatheredParams):
    """Weights that layers multiply in E4M3 with one scale per tensor; see `GatheredParams`.

    Args:
        quantized: products of each parameter of the layout.
    Communication:
        one all-reduce of a number for each parameter over the shards and over the tensor-parallel
        ranks, then all-gathers of one byte per element.
    """

    def __init__(self, flat: FlatParams, quantized: Sequence[QuantizedLinear]) -> None:
        super().__init__(flat)
        self._quantized = list(quantized)
        self._codes = flat.zeros(flat.plan.numel, torch.uint8)
        # The last element is 1 if the weights have changed on any rank.
        self._amaxes = torch.zeros(len(quantized) + 1, device=flat.device)
        self._factors = torch.ones(len(quantized), device=flat.device)

    def start(self) -> None:
        """Round the own shards, and start to gather the codes of all ranks, first layers first."""
        self.finish()
        self._codes.wait_for_readers()
        self._round_own()
        for bucket in reversed(self._flat.buckets):
            self._gathers[bucket.number] = Work(self._gather(bucket))

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the own shards any more."""
        super().wait_for_readers()
        self._codes.wait_for_readers()

    def _own_pieces(self) -> Iterable[tuple[Piece, Tensor, Tensor]]:
        """Yield each piece that this rank owns, its values and its codes, 1-d each."""
        for begin, end in self._flat.shard_ranges():
            for piece in self._flat.plan.pieces(begin, end):
                yield piece, *self._views(piece)

    def _views(self, piece: Piece) -> tuple[Tensor, Tensor]:
        values = self._flat.parameters[piece.index].data.view(-1)[piece.begin : piece.end]
        codes = self._codes.values[piece.offset : piece.offset + piece.end - piece.begin]
        return values, codes

    @torch.no_grad()
    def _round_own(self) -> None:
        """Find the scale of each weight, and write the codes of the own pieces."""
        found = torch.zeros_like(self._amaxes)
        for piece, values, codes in self._own_pieces():
            amax = largest_magnitude(values).float()
            found[piece.index] = torch.maximum(found[piece.index], amax)
            same = self._numbers(codes, piece.index).eq(values).all()
            found[-1] = torch.maximum(found[-1], same.logical_not().float())
        for group in (self._flat.mesh.shard, self._quantized[0].tp):
            backend.all_reduce(found, group, ReduceOp.MAX)
        # Unchanged rounded weights keep the amaxes of the unrounded weights.
        self._amaxes = torch.where(found[-1] > 0, found, self._amaxes)
        amaxes = zip(self._quantized, self._amaxes[:-1], strict=True)
        scale = torch.stack([quantized.scale_of_weight(amax) for quantized, amax in amaxes])
        self._factors = 1.0 / scale
        for piece, values, codes in self._own_pieces():
            rounded = scaled_cast(values, scale[piece.index], torch.float8_e4m3fn)
            codes.copy_(rounded.view(torch.uint8))

    def _numbers(self, codes: Tensor, index: int) -> Tensor:
        """Return the numbers of codes [n] of a parameter, in its dtype."""
        numbers = codes.view(torch.float8_e4m3fn).float() * self._factors[index]
        return numbers.to(self._flat.dtype)

    def _gather(self, bucket: Bucket) -> Steps[None]:
        yield from gather_parameters(
            self._codes.values[bucket.begin : bucket.end],
            self._flat.mesh,
            tag=self._flat.tag + bucket.number,
            slot=self._codes.slot(bucket.number),
        )
        for piece in self._flat.plan.pieces(bucket.begin, bucket.end):
            values, codes = self._views(piece)
            values.copy_(self._numbers(codes, piece.index))


def gathered_params(flat: FlatParams, *, is_updated_on_host: bool = False) -> GatheredParams:
    """Return the object that gathers the updated parameters of a layout."""
    if flat.quantized and flat.mesh.shard_size > 1:
        return QuantizedParams(flat, flat.quantized)
    return GatheredParams(flat, is_updated_on_host=is_updated_on_host)
