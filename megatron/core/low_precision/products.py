"""The three products of a linear layer with operands of few bits, the same in every layout.

Blocks along tokens never cross samples, so a product does not depend on how many samples a micro
batch has. Where ranks hold parts of one block, or of one tensor that has one scale, they take the
largest magnitude over all of them: the numbers are then those of one process, up to the order of
sums. Random rounding is keyed by sample, position and feature.

Legend: s sequence, b micro batch, i/o input/output features of this rank, t = s * b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.low_precision import spreading
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.formats import in_working_dtype
from megatron.core.low_precision.recipes import Operand, Recipe
from megatron.core.low_precision.scaling import Cut, Cuts, Quantized, Scaling, TensorScaling
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.context import current_step
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.topology.group import Group
from megatron.core.transport import backend, collectives


def emulated_product(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
    """Multiply left [m, k] with the transpose of right [n, k]: [m, n] in `dtype`.

    Elements times block scales are exact in fp32, sums are in fp32 (fp64 for fp64 operands), and
    the scales of tensors multiply the sums.
    """
    product = left.values @ right.values.t()
    for factor in (left.factor, right.factor):
        if factor is not None:
            product *= factor
    return product.to(dtype)


_EMULATION = Kernel("emulation", emulated_product)

LOW_PRECISION_PRODUCTS: KernelTable[Callable[[Quantized, Quantized, torch.dtype], Tensor]] = (
    KernelTable("low-precision products", {OTHER_DEVICES: (_EMULATION,)})
)


def _product(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
    kernel = LOW_PRECISION_PRODUCTS.choose(Request.of(left.values)).kernel
    return kernel.run(left, right, dtype)


@dataclass(frozen=True)
class Call:
    """What is known of the tokens of one forward pass when its backward pass comes.

    Attributes:
        positions: int64 [s], places of the rows in their samples; total: length of a sample.
        first_sample: number of the first sample of the micro batch.
        key: of the random rounding; None: rounding is to the nearest.
        records: amaxes of this pass enter the history.
        gradient_unit: what the loss of a micro batch is multiplied with, by the layout. Scales of
            gradients are found without it.
    """

    positions: Tensor
    total: int
    first_sample: int
    key: tuple[int | str, ...] | None
    records: bool
    gradient_unit: float


@dataclass(frozen=True, kw_only=True)
class LinearProducts:
    """How one linear layer multiplies.

    Attributes:
        tp: ranks over which the weight is split; cp: ranks over which a sample is split.
        split_dim: dimension of the weight [o, i] that is split; None: it is whole.
        stride: blocks of that dimension that are each split.
        has_low_precision_wgrad: weight gradients are computed from rounded operands too.
        history: amaxes of earlier steps, for a recipe that scales by them.
    """

    recipe: Recipe
    tp: Group
    cp: Group
    split_dim: int | None
    stride: int = 1
    has_low_precision_wgrad: bool = True
    history: AmaxHistory | None = None
    _features: dict[int, Cut] = field(default_factory=dict, compare=False, repr=False)

    def call(self, x: Tensor, sequence_shards: Group | None, records: bool) -> Call:
        """Remember whose tokens x [s, b, i], or rows [n, i] of an expert, are.

        Args:
            sequence_shards: ranks whose rows x is gathered from under sequence parallelism, or over
                which the output will be scattered; the random scope knows this rank's own.
            records: whether a backward pass follows.
        """
        state = rng_state()
        rows = state.scope.rows
        num_rows = x.shape[0]
        positions = None
        if x.dim() == 3 and rows is not None:
            positions = rows.positions(x.device)
            if sequence_shards is not None and len(positions) != num_rows:
                positions = collectives.all_gather(positions, sequence_shards)
        if positions is None or rows is None or len(positions) != num_rows:
            rows = SequenceShard.full(num_rows)
            positions = rows.positions(x.device)
        rotates = self.recipe.rotates and self.has_low_precision_wgrad
        if rotates and len(positions) != rows.total:
            self._check_runs(positions, rows.total)
        key = state.next_key() if self.recipe.rounds_at_random else None
        scale = current_step().aux_loss_scale
        unit = 1.0 if scale.per_token else scale.factor
        return Call(positions, rows.total, state.first_sample, key, records, unit)

    def _check_runs(self, positions: Tensor, total: int) -> None:
        run = spreading.HADAMARD_SIZE
        if not self._cut_of_tokens(positions, total).keeps_whole(run):
            raise ConfigError(
                f"{self.recipe.name} with a sequence of {total} over {self.cp.size()}"
                " context-parallel ranks.",
                rule=f"a run of {run} tokens, which are transformed together, is on one rank",
                flags=["--seq-length", "--context-parallel-size", "--fp4-format"],
                fix=f"use a --seq-length that {2 * run * self.cp.size()} divides",
            )

    def forward(self, x: Tensor, weight: Tensor, call: Call) -> Tensor:
        """Return x [..., i] times the transpose of weight [o, i]: [..., o]."""
        rows = x.reshape(-1, x.shape[-1])
        left = self._round(Operand.INPUT, rows, Cuts(None, self._cut(1, x.shape[-1])), call)
        right = self._round(Operand.WEIGHT, weight, self._weight_cuts(weight), call)
        return _product(left, right, x.dtype).view(*x.shape[:-1], len(weight))

    def input_gradient(self, grad: Tensor, weight: Tensor, call: Call) -> Tensor:
        """Return grad [..., o] times weight [o, i]: [..., i]."""
        rows = grad.reshape(-1, grad.shape[-1])
        uniform = None
        if call.key is not None:
            uniform = self._uniform(grad, call, "input").flatten(0, -2)
        cuts = Cuts(None, self._cut(0, grad.shape[-1]))
        left = self._round(Operand.GRADIENT, rows, cuts, call, uniform)
        whole = self._weight_cuts(weight)
        cuts = Cuts(whole.columns, whole.rows)
        right = self._round(Operand.WEIGHT, weight.t(), cuts, call)
        return _product(left, right, grad.dtype).view(*grad.shape[:-1], weight.shape[1])

    def weight_gradient(self, grad: Tensor, x: Tensor, call: Call) -> Tensor:
        """Return the transpose of grad [s, b, o] times x [s, b, i]: [o, i]."""
        if not self.has_low_precision_wgrad:
            return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        if not x.numel():
            return x.new_zeros(grad.shape[-1], x.shape[-1])
        if grad.dim() == 2:
            grad, x = grad[:, None], x[:, None]
        cuts = Cuts(None, self._token_cut(call))
        uniform = None
        if call.key is not None:
            uniform = self._along_tokens(self._uniform(grad, call, "weight"))
        operands = []
        for operand, values in ((Operand.GRADIENT, grad), (Operand.INPUT, x)):
            rows = self._along_tokens(values)
            if self.recipe.rotates:
                rows = spreading.rotate(in_working_dtype(rows))
            drawn = uniform if operand is Operand.GRADIENT else None
            operands.append(self._round(operand, rows, cuts, call, drawn))
        left, right = (_join_samples(part, x.shape[1]) for part in operands)
        return _product(left, right, grad.dtype)

    def _round(
        self,
        operand: Operand,
        x: Tensor,
        cuts: Cuts,
        call: Call,
        uniform: Tensor | None = None,
    ) -> Quantized:
        scaling = self.recipe.scalings[operand]
        amax = None
        if self.history is not None:
            unit = call.gradient_unit if operand is Operand.GRADIENT else 1.0
            if call.records:
                known = self.history.weight_amax if operand is Operand.WEIGHT else None
                found = largest_magnitude(x).double() / unit if known is None else known
                self.history.record(operand.index, found)
            # Without a history the scale is 1 for the loss of a micro batch as it is: multiplied by
            # what the layout multiplies that loss with, a gradient would meet another step.
            amax = self._remembered(operand) * unit
            amax = amax.to(in_working_dtype(x).dtype)
        elif scaling.needs_amax:
            amax = largest_magnitude(x)
            for group in (self.tp, self.cp):
                backend.all_reduce(amax, group, ReduceOp.MAX)
        elif operand is Operand.GRADIENT:
            return _round_without_unit(scaling, x, cuts, call.gradient_unit, uniform)
        return scaling.quantize(x, amax, uniform, cuts)

    def _remembered(self, operand: Operand) -> Tensor:
        """Return the amax of the history, [] fp64; without one, that of a scale of 1."""
        scaling = self.recipe.scalings[operand]
        assert isinstance(scaling, TensorScaling) and self.history is not None
        amax = self.history.amax(operand.index)
        return torch.where(amax == 0, scaling.amax_of_scale_one, amax)

    @property
    def has_one_weight_scale(self) -> bool:
        """Whether the weight has one scale, so that it is rounded the same for every product."""
        return isinstance(self.recipe.scalings[Operand.WEIGHT], TensorScaling)

    def scale_of_weight(self, amax: Tensor) -> Tensor:
        """Return what the products of the coming step multiply the weight with, [] fp32.

        Args:
            amax: [] fp32, of the whole unrounded weight; the history takes it in the coming step.
        """
        scaling = self.recipe.scalings[Operand.WEIGHT]
        assert isinstance(scaling, TensorScaling), scaling
        if self.history is not None:
            self.history.weight_amax = amax.double()
            amax = self._remembered(Operand.WEIGHT).to(amax.dtype)
        return scaling.scale(amax)

    def _weight_cuts(self, weight: Tensor) -> Cuts:
        return Cuts(self._cut(0, weight.shape[0]), self._cut(1, weight.shape[1]))

    def _cut(self, dim: int, size: int) -> Cut | None:
        """Return how a dimension of the weight is cut: also that of x (1) or the gradient (0)."""
        if dim != self.split_dim or self.tp.size() == 1:
            return None
        if dim not in self._features:
            ranks, rank = self.tp.size(), self.tp.rank()
            places = torch.arange(size * ranks).view(self.stride, ranks, size // self.stride)
            positions, piece = places[:, rank].flatten(), size // self.stride
            self._features[dim] = Cut(positions, size * ranks, piece, _largest(self.tp))
        return self._features[dim]

    def _token_cut(self, call: Call) -> Cut | None:
        if len(call.positions) == call.total:
            return None
        return self._cut_of_tokens(call.positions, call.total)

    def _cut_of_tokens(self, positions: Tensor, total: int) -> Cut:
        return Cut(positions, total, total // (2 * self.cp.size()), _largest(self.cp))

    def _along_tokens(self, x: Tensor) -> Tensor:
        """Bring x [s, b, k] to rows of features and samples: [k * b, s]."""
        return x.permute(2, 1, 0).reshape(-1, x.shape[0])

    def _uniform(self, grad: Tensor, call: Call, purpose: str) -> Tensor:
        """Draw a number for each element of grad [..., o]; for weights, of the rotated one."""
        assert call.key is not None
        positions = call.positions
        if purpose == "weight" and len(positions) % spreading.HADAMARD_SIZE:
            # A run of the transform that the sequence does not fill: it is a whole sequence.
            missing = -len(positions) % spreading.HADAMARD_SIZE
            positions = torch.arange(len(positions) + missing, device=grad.device)
        num_samples = grad.shape[1] if grad.dim() == 3 else 1
        samples = call.first_sample + torch.arange(num_samples, device=grad.device)
        row, sample = torch.broadcast_tensors(positions[:, None], samples)
        keys = spreading.row_keys((*call.key, purpose), sample.flatten(), row.flatten())
        cut = self._cut(0, grad.shape[-1])
        columns = torch.arange(grad.shape[-1]) if cut is None else cut.positions
        drawn = spreading.uniform(keys, columns.to(grad.device))
        return drawn.view(len(positions), num_samples, -1)


def _round_without_unit(
    scaling: Scaling, x: Tensor, cuts: Cuts, unit: float, uniform: Tensor | None
) -> Quantized:
    """Round the gradient x [rows, k] in steps that do not depend on its unit.

    Scales that are powers of two follow a unit that is one. Of another, what is left over such a
    power is taken out, and multiplies the product.
    """
    fraction = math.frexp(unit)[0]
    if fraction == 0.5:
        return scaling.quantize(x, None, uniform, cuts)
    rounded = scaling.quantize(in_working_dtype(x) / fraction, None, uniform, cuts)
    factor = torch.full((), fraction, dtype=rounded.values.dtype, device=x.device)
    return replace(rounded, factor=factor)


def _largest(group: Group) -> Callable[[Tensor], Tensor]:
    def over_ranks(x: Tensor) -> Tensor:
        return backend.all_reduce(x, group, ReduceOp.MAX)

    return over_ranks


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of x, [], fp32 or fp64; infinity if there is a NaN."""
    x = in_working_dtype(x)
    found = x.abs().amax() if x.numel() else x.new_zeros(())
    # The maximum of NaN over ranks is not defined.
    return found.nan_to_num(float("inf"), posinf=float("inf"))


def _join_samples(rounded: Quantized, num_samples: int) -> Quantized:
    """Lay the samples of rows [k * b, s] one after the other: [k, b * s]."""
    values = rounded.values.reshape(-1, num_samples * rounded.values.shape[1])
    return Quantized(values, rounded.format, rounded.elements, rounded.factor)
