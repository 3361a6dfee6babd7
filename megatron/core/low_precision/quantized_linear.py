"""The three products of a linear layer with low-precision operands, the same in every layout.

Blocks along tokens never cross samples, so a product does not depend on the number of samples in a
micro batch. Where ranks hold parts of one block, or of a tensor with one scale, the scale follows
the largest magnitude over all of them: the results equal one process's results, up to the order of
sums. Stochastic rounding is keyed by sample, position and feature.

Legend: s sequence, b micro batch, i/o input/output features of this rank, t = s * b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.foundation.device import fp8_product_multiple, why_no_fp8_products
from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request, dtype_name
from megatron.core.low_precision import hadamard
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.recipes import Operand, Recipe
from megatron.core.low_precision.scaling import (
    Cut,
    Cuts,
    Quantized,
    Scaling,
    TensorScaling,
    in_working_dtype,
)
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.context import current_step
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.topology.group import Group
from megatron.core.transport import collectives, torch_collectives

Product: TypeAlias = Callable[[Quantized, Quantized, torch.dtype, bool], Tensor]
"""(left [m, k], right [n, k], dtype, fast) -> left times the transpose of right, [m, n] in dtype;
`fast` allows sums of lower precision, which suffice in forward (`use_fast_accum`)."""

BLOCK_SCALES = "scales per block"


def scaled_mm(left: Quantized, right: Quantized, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply FP8 operands with one scale each by `torch._scaled_mm`; see `Product`."""
    a, b = left.data, right.data
    if not (a.numel() and b.numel()):
        return torch.zeros(len(a), len(b), dtype=dtype, device=a.device)
    multiple = fp8_product_multiple(a.device)
    a, b = _padded(a, 1, multiple), _padded(b, multiple, multiple)
    assert left.factor is not None and right.factor is not None
    out = torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=left.factor, scale_b=right.factor,
        out_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip
    return out[:, : len(right.data)]


def _padded(x: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """Pad FP8 x [rows, k] with zeros to multiples of two numbers."""
    rows, columns = -len(x) % row_multiple, -x.shape[1] % column_multiple
    if not (rows or columns):
        return x
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)


def dequantized_product(
    left: Quantized, right: Quantized, dtype: torch.dtype, _fast: bool
) -> Tensor:
    """Multiply the dequantized operands in fp32 (fp64 for fp64 operands); see `Product`."""
    wide = torch.promote_types(dtype, torch.float32)
    product = left.data.to(wide) @ right.data.to(wide).t()
    for factor in (left.factor, right.factor):
        if factor is not None:
            product *= factor
    return product.to(dtype)


LOW_PRECISION_PRODUCTS: KernelTable[Product] = KernelTable(
    "low-precision products",
    {
        OTHER_DEVICES: (
            Kernel(
                "scaled-mm",
                scaled_mm,
                dtypes=frozenset({"float32", "bfloat16", "float16"}),
                missing=why_no_fp8_products,
            ),
            Kernel("dequantized", dequantized_product, frozenset({BLOCK_SCALES})),
        )
    },
)


def _product(left: Quantized, right: Quantized, dtype: torch.dtype, *, fast: bool) -> Tensor:
    needs = frozenset({BLOCK_SCALES} if left.block_scales is not None else ())
    request = Request(left.data.device.type, dtype_name(dtype), needs)
    return LOW_PRECISION_PRODUCTS.choose(request).kernel.run(left, right, dtype, fast)


@dataclass(frozen=True)
class GemmContext:
    """Properties of the tokens of a forward pass that its backward pass needs.

    Attributes:
        positions: int64 [s], positions of the tokens in their samples; total: length of a sample.
        first_sample: number of the first sample of the micro batch.
        key: key of the stochastic rounding; None rounds to the nearest.
        records: amaxes of this pass enter the history.
        gradient_unit: factor of the layout on the loss of a micro batch. Scales of gradients are
            computed without it.
    """

    positions: Tensor
    total: int
    first_sample: int
    key: tuple[int | str, ...] | None
    records: bool
    gradient_unit: float


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """The low-precision products of one linear layer.

    Attributes:
        tp: ranks that split the weight; cp: ranks that split a sample.
        split_dim: dimension of the weight [o, i] that tp splits; None: every rank has the weight.
        stride: number of blocks of that dimension; each block is split.
        has_low_precision_wgrad: weight gradients are computed from rounded operands too.
        history: amaxes of earlier steps, for delayed scaling.
    """

    recipe: Recipe
    tp: Group
    cp: Group
    split_dim: int | None
    stride: int = 1
    has_low_precision_wgrad: bool = True
    history: AmaxHistory | None = None
    _features: dict[int, Cut] = field(default_factory=dict, compare=False, repr=False)

    def context(self, x: Tensor, sequence_shards: Group | None, records: bool) -> GemmContext:
        """Return the positions of the tokens in x [s, b, i], or [n, i] of an expert.

        Args:
            sequence_shards: under sequence parallelism the group that gathered x, or that will
                scatter the output; the random scope has the positions of this rank.
            records: whether a backward pass follows.
        Communication:
            all-gather of positions over `sequence_shards`.
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
        return GemmContext(positions, rows.total, state.first_sample, key, records, unit)

    def _check_runs(self, positions: Tensor, total: int) -> None:
        run = hadamard.HADAMARD_SIZE
        if not self._cut_of_tokens(positions, total).keeps_whole(run):
            raise ConfigError(
                f"{self.recipe.name} with a sequence of {total} over {self.cp.size()}"
                " context-parallel ranks.",
                rule=f"a run of {run} tokens, which are transformed together, is on one rank",
                flags=["--seq-length", "--context-parallel-size", "--fp4-format"],
                fix=f"use a --seq-length that {2 * run * self.cp.size()} divides",
            )

    def forward(self, x: Tensor, weight: Tensor, context: GemmContext) -> Tensor:
        """Return x [..., i] times the transpose of weight [o, i]: [..., o]."""
        rows = x.reshape(-1, x.shape[-1])
        cuts = self._weight_cuts(weight)
        left = self._round(Operand.INPUT, rows, Cuts(None, cuts.columns), context)
        right = self._round(Operand.WEIGHT, weight, cuts, context)
        product = _product(left, right, x.dtype, fast=True)
        return product.reshape(*x.shape[:-1], len(weight))

    def input_gradient(self, grad: Tensor, weight: Tensor, context: GemmContext) -> Tensor:
        """Return grad [..., o] times weight [o, i]: [..., i]."""
        rows = grad.reshape(-1, grad.shape[-1])
        uniform = None
        if context.key is not None:
            uniform = self._uniform(grad, context, "input").flatten(0, -2)
        cuts = self._weight_cuts(weight)
        left = self._round(Operand.GRADIENT, rows, Cuts(None, cuts.rows), context, uniform)
        cuts = Cuts(cuts.columns, cuts.rows)
        right = self._round(Operand.WEIGHT, weight.t(), cuts, context)
        product = _product(left, right, grad.dtype, fast=False)
        return product.reshape(*grad.shape[:-1], weight.shape[1])

    def weight_gradient(self, grad: Tensor, x: Tensor, context: GemmContext) -> Tensor:
        """Return the transpose of grad [s, b, o] times x [s, b, i]: [o, i]."""
        if not self.has_low_precision_wgrad:
            return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        if not x.numel():
            return x.new_zeros(grad.shape[-1], x.shape[-1])
        if grad.dim() == 2:
            grad, x = grad[:, None], x[:, None]
        token_cut = None
        if len(context.positions) != context.total:
            token_cut = self._cut_of_tokens(context.positions, context.total)
        cuts = Cuts(None, token_cut)
        uniform = None
        if context.key is not None:
            uniform = _along_tokens(self._uniform(grad, context, "weight"))
        operands = []
        for operand, values in ((Operand.GRADIENT, grad), (Operand.INPUT, x)):
            rows = _along_tokens(values)
            if self.recipe.rotates:
                rows = hadamard.rotate(in_working_dtype(rows))
            drawn = uniform if operand is Operand.GRADIENT else None
            operands.append(self._round(operand, rows, cuts, context, drawn))
        left, right = (_join_samples(part, x.shape[1]) for part in operands)
        return _product(left, right, grad.dtype, fast=False)

    def _round(
        self,
        operand: Operand,
        x: Tensor,
        cuts: Cuts,
        context: GemmContext,
        uniform: Tensor | None = None,
    ) -> Quantized:
        scaling = self.recipe.scalings[operand]
        amax = None
        if self.history is not None:
            unit = context.gradient_unit if operand is Operand.GRADIENT else 1.0
            if context.records:
                known = self.history.weight_amax if operand is Operand.WEIGHT else None
                found = largest_magnitude(x).double() / unit if known is None else known
                self.history.record(operand.index, found)
            # The history is kept without the layout's factor on the loss. The factor is applied
            # here, so that a gradient is rounded at the same steps in every layout.
            amax = self._remembered(operand) * unit
            amax = amax.to(in_working_dtype(x).dtype)
        elif scaling.needs_amax:
            amax = largest_magnitude(x)
            for group in (self.tp, self.cp):
                torch_collectives.all_reduce(amax, group, ReduceOp.MAX)
        elif operand is Operand.GRADIENT:
            return _round_without_unit(scaling, x, cuts, context.gradient_unit, uniform)
        return scaling.quantize(x, amax, uniform, cuts)

    def _remembered(self, operand: Operand) -> Tensor:
        """Return the amax of the history, [] fp64; before the first step, the amax of scale 1."""
        scaling = self.recipe.scalings[operand]
        assert isinstance(scaling, TensorScaling) and self.history is not None
        amax = self.history.amax(operand.index)
        return torch.where(amax == 0, scaling.amax_of_scale_one, amax)

    @property
    def has_one_weight_scale(self) -> bool:
        """Whether the weight has one scale, so that all products round it to the same numbers."""
        return isinstance(self.recipe.scalings[Operand.WEIGHT], TensorScaling)

    def scale_of_weight(self, amax: Tensor) -> Tensor:
        """Return the scale of the weight in the products of the next step, [] fp32.

        Args:
            amax: [] fp32, of the whole unrounded weight; the next step enters it in the history.
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
        """Return how tp cuts a dimension of the weight [o, i]; the gradient has o, the input i."""
        if dim != self.split_dim or self.tp.size() == 1:
            return None
        if dim not in self._features:
            ranks, rank = self.tp.size(), self.tp.rank()
            places = torch.arange(size * ranks).view(self.stride, ranks, size // self.stride)
            positions, piece = places[:, rank].flatten(), size // self.stride
            self._features[dim] = Cut(
                positions,
                size * ranks,
                piece,
                lambda x: torch_collectives.all_reduce(x, self.tp, ReduceOp.MAX),
            )
        return self._features[dim]

    def _cut_of_tokens(self, positions: Tensor, total: int) -> Cut:
        return Cut(
            positions,
            total,
            total // (2 * self.cp.size()),
            lambda x: torch_collectives.all_reduce(x, self.cp, ReduceOp.MAX),
        )

    def _uniform(self, grad: Tensor, context: GemmContext, purpose: str) -> Tensor:
        """Draw a number in [0, 1) for each element of grad [..., o], fp32 [s, b, o].

        For the weight gradient s is padded to whole runs of the Hadamard transform.
        """
        assert context.key is not None
        positions = context.positions
        if purpose == "weight" and len(positions) % hadamard.HADAMARD_SIZE:
            # Ranks hold whole runs, so an incomplete run ends a sequence that this rank has whole.
            missing = -len(positions) % hadamard.HADAMARD_SIZE
            positions = torch.arange(len(positions) + missing, device=grad.device)
        num_samples = grad.shape[1] if grad.dim() == 3 else 1
        samples = context.first_sample + torch.arange(num_samples, device=grad.device)
        row, sample = torch.broadcast_tensors(positions[:, None], samples)
        keys = hadamard.row_keys((*context.key, purpose), sample.flatten(), row.flatten())
        cut = self._cut(0, grad.shape[-1])
        columns = torch.arange(grad.shape[-1]) if cut is None else cut.positions
        drawn = hadamard.uniform(keys, columns.to(grad.device))
        return drawn.view(len(positions), num_samples, -1)


def _round_without_unit(
    scaling: Scaling, x: Tensor, cuts: Cuts, unit: float, uniform: Tensor | None
) -> Quantized:
    """Round the gradient x [rows, k] at the same steps in every layout.

    `unit` is the layout's factor on the loss. Scales that are powers of two follow a power of two
    in it. The remaining fraction divides x before the rounding, and multiplies the product.
    """
    fraction = math.frexp(unit)[0]
    if fraction == 0.5:
        return scaling.quantize(x, None, uniform, cuts)
    rounded = scaling.quantize(in_working_dtype(x) / fraction, None, uniform, cuts)
    factor = torch.full((), fraction, dtype=rounded.data.dtype, device=x.device)
    return replace(rounded, factor=factor)


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of x, [], fp32 or fp64; infinity if there is a NaN."""
    if not x.numel():
        return in_working_dtype(x.new_zeros(()))
    lowest, highest = x.aminmax()
    # The maximum of NaN over ranks is not defined.
    return in_working_dtype(torch.maximum(-lowest, highest)).nan_to_num(math.inf, math.inf)


def _join_samples(rounded: Quantized, num_samples: int) -> Quantized:
    """Concatenate the samples of rows [k * b, s] along the tokens: [k, b * s]."""
    return replace(rounded, data=rounded.data.reshape(-1, num_samples * rounded.data.shape[1]))


def _along_tokens(x: Tensor) -> Tensor:
    """Return x [s, b, k] as rows of features and samples: [k * b, s]."""
    return x.permute(2, 1, 0).reshape(-1, x.shape[0])
