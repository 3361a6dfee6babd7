"""Parameters of which one byte per element is gathered: E4M3, with one scale for each tensor.

An owner scales and rounds its piece of a weight as the products of the layer would, with the
scale of the whole tensor, and sends the codes. What a rank keeps, in the dtype of the model, is the
number of each code; the products scale and round it to the same code again, because bf16 has more
bits. So a step computes what it would with parameters that were gathered as they are.

The largest magnitudes are those of the unrounded weights, of all pieces; the history of delayed
scaling takes them from here.
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
from megatron.core.low_precision.formats import E4M3
from megatron.core.low_precision.products import LinearProducts, largest_magnitude
from megatron.core.low_precision.scaling import round_to_scale
from megatron.core.transport import backend
from megatron.core.transport.work import Steps, Work


class QuantizedParams(GatheredParams):
    """The weights of layers that multiply in E4M3 with a scale of the tensor. See `GatheredParams`.

    Args:
        products: how each parameter of the layout is rounded.
    Communication:
        one all-reduce of a number for each parameter over the shards and over the tensor-parallel
        ranks, then all-gathers of one byte per element.
    """

    def __init__(self, flat: FlatParams, products: Sequence[LinearProducts]) -> None:
        super().__init__(flat)
        self._products = list(products)
        self._codes = flat.zeros(flat.plan.numel, torch.uint8)
        # One number more says whether any rank's weights have changed.
        self._amaxes = torch.zeros(len(products) + 1, device=flat.device)
        self._factors = torch.ones(len(products), device=flat.device)

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
        for group in (self._flat.mesh.shard, self._products[0].tp):
            backend.all_reduce(found, group, ReduceOp.MAX)
        # Rounded weights that nobody has changed have the amaxes of those they were made of.
        self._amaxes = torch.where(found[-1] > 0, found, self._amaxes)
        scales = []
        for products, amax in zip(self._products, self._amaxes[:-1], strict=True):
            scales.append(products.scale_of_weight(amax))
        scale = torch.stack(scales)
        self._factors = 1.0 / scale
        for piece, values, codes in self._own_pieces():
            elements = round_to_scale(E4M3, values, scale[piece.index])
            codes.copy_(elements.to(torch.float8_e4m3fn).view(torch.uint8))

    def _numbers(self, codes: Tensor, index: int) -> Tensor:
        """Return what codes [n] of a parameter stand for, in its dtype."""
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
    """Return how the updated parameters of a layout are gathered."""
    if flat.products and flat.mesh.shard_size > 1:
        return QuantizedParams(flat, flat.products)
    return GatheredParams(flat, is_updated_on_host=is_updated_on_host)
