"""Parameters of one dtype laid out in a flat range, which is cut into buckets and shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.parameter_shard import ParameterShard, ShardSpan
from megatron.core.distributed.sharding_arithmetic import BLOCK, BufferPlan, Piece
from megatron.core.low_precision.quantized_linear import QuantizedLinear
from megatron.core.offload.device_copies import AsyncFetch
from megatron.core.transport.work import AnyWork


class Bucket:
    """One unit of communication: a range of the layout and the parameters in it."""

    def __init__(self, number: int, begin: int, end: int, param_indices: list[int]) -> None:
        self.number = number
        self.begin, self.end = begin, end
        self.param_indices = param_indices
        """Parameter numbers, in the order in which backward finishes them."""
        self.is_launched = False
        self.num_pending = len(param_indices)
        """Members whose gradient has not arrived."""
        self.reduction: AnyWork | None = None
        """The last reduction; it may still run when another backward pass has begun."""

    def reset(self) -> None:
        """Wait for all members again."""
        self.is_launched = False
        self.num_pending = len(self.param_indices)


class FlatParams:
    """The layout of a set of parameters; holds no values and no gradients.

    Args:
        parameters: (name, parameter) in forward order, of one dtype, on one device.
        tag: first message tag of the buckets.
        quantized: products of each parameter, if parameters are gathered in the products' format.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        plan: BufferPlan,
        mesh: Mesh,
        *,
        tag: int = 0,
        quantized: Sequence[QuantizedLinear] = (),
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.plan, self.mesh, self.tag, self.quantized = plan, mesh, tag, quantized
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        self.buckets: list[Bucket] = []
        self.buckets_of: list[list[Bucket]] = [[] for _ in self.parameters]
        for number, (begin, end) in enumerate(self.plan.buckets):
            param_indices = [slot.index for slot in self.plan.slots_in(begin, end)]
            bucket = Bucket(number, begin, end, param_indices)
            self.buckets.append(bucket)
            for index in param_indices:
                self.buckets_of[index].append(bucket)

    def shard_ranges(self) -> list[tuple[int, int]]:
        """Return this rank's shard [begin, end) of each bucket."""
        rank, size = self.mesh.shard_rank, self.mesh.shard_size
        return [self.plan.shard(bucket.number, rank, size) for bucket in self.buckets]

    def span(
        self,
        begin: int,
        end: int,
        gradients: Tensor,
        values_of: Callable[[Piece], Tensor] | None = None,
        fetch: AsyncFetch | None = None,
    ) -> ShardSpan:
        """Describe [begin, end) of the layout to an optimizer.

        Args:
            gradients: [end - begin].
            values_of: returns the model's values of a piece; by default a view of its parameter.
            fetch: copies values that are computed in host memory to the device.
        """
        values_of = values_of or self.values_of
        pieces = self.plan.pieces(begin, end)
        offsets = [piece.offset for piece in pieces]
        assert offsets[:1] in ([], [begin]), (offsets, begin, end)
        # The zero padding between two pieces belongs to the first of them.
        num_blocks = [
            (following - offset) // BLOCK
            for offset, following in zip(offsets, [*offsets[1:], end], strict=False)
        ]
        shards = []
        for piece in pieces:
            parameter, name = self.parameters[piece.index], self.names[piece.index]
            values = values_of(piece)
            gradient = gradients[piece.offset - begin :][: values.numel()].view(values.shape)
            begins, ends = piece.begin, piece.end
            shards.append(
                ParameterShard(name, parameter, begins, ends, values, gradient, self.mesh, fetch)
            )
        return ShardSpan(gradients, shards, num_blocks)

    def values_of(self, piece: Piece) -> Tensor:
        """Return the model's values of a piece: the parameter itself, or a 1-d view into it."""
        parameter = self.parameters[piece.index]
        if piece.end - piece.begin == parameter.numel():
            return parameter
        return parameter.data.view(-1)[piece.begin : piece.end]
