"""One linear map per expert, applied to the rows of that expert in one call.

Legend: n rows, ordered by expert; i, o input and output features of this rank; l local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.kernels.grouped_products import (
    fill_tiles,
    grouped_outer_products,
    grouped_products,
    needs_no_host_counts,
)
from megatron.core.kernels.row_counts import (
    counts_on_device,
    group_of_row,
    join_rows,
    split_rows,
)
from megatron.core.kernels.weight_gradient import main_grad_addmm
from megatron.core.low_precision.quantized_linear import QuantizedLinear
from megatron.core.parameters.initialization import make_adjacent
from megatron.core.parameters.param_meta import (
    accumulate_main_grads,
    add_gradient,
    has_main_grad,
    in_rows,
)
from megatron.core.step_context import deferred_wgrad
from megatron.core.tensor_parallel.linear_with_overlap import (
    InputMode,
    LinearCommSpec,
    OutputMode,
    parallel_linear,
)
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

_T = TypeVar("_T", bound=Tensor)


class GroupedLinear(ParallelLayer):
    """One linear map per expert, with parameters `weight0`, `weight1`, ..., split over `expt_tp`.

    The dispatcher communicates; this layer does not. Weights, and biases, are adjacent in memory,
    expert by expert, also in the buffers of `DistributedDataParallel`: kernels read them, and add
    their gradients, as one tensor.

    Args:
        input_size, output_size: full sizes of one map.
        split_dim: 0 splits the outputs (and the biases), 1 the inputs.
        stride: number of blocks of the outputs; each block is split.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        split_dim: int,
        stride: int = 1,
        expt_tp: Group,
    ) -> None:
        super().__init__(config, tp_group=expt_tp, is_expert=True)
        # On the module too: clients read these attributes there.
        self.tensor_model_parallel, self.partition_dim = True, split_dim
        shape = [output_size, input_size]
        shape[split_dim] = divide(shape[split_dim], self.tp_size)
        splits_output = split_dim == 0
        self.spec = LinearCommSpec(
            expt_tp,
            input_mode=InputMode.REPLICATED if splits_output else InputMode.LOCAL,
            output_mode=OutputMode.LOCAL if splits_output else OutputMode.ALL_REDUCE,
            fuses_main_grad=config.gradient_accumulation_fusion,
            units=self.units(split_dim, stride),
        )
        """Of layout-invariant mode: the layer completes its sums."""
        is_whole = splits_output or self.tp_size == 1 or config.layout_invariant_mode
        for index in range(num_gemms):
            weight = self.new_parameter(
                *shape, init_method=init_method, split_dim=split_dim, stride=stride
            )
            self.register_parameter(f"weight{index}", weight)
        for index in range(num_gemms if bias else 0):
            added = self.new_parameter(
                shape[0],
                init_method=None,
                split_dim=0 if splits_output else None,
                stride=stride if splits_output else 1,
                # The first rank alone adds the bias.
                partial_grad_axes=() if is_whole else (self.split_axis,),
            )
            self.register_parameter(f"bias{index}", added)
        self.num_gemms, self.uses_bias = num_gemms, bias
        make_adjacent(self.parameters(recurse=False))
        self.quantized: list[QuantizedLinear] = []
        """The low-precision products of each weight; empty without low precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        """Move or convert the layer; its weights stay adjacent in memory."""
        super()._apply(fn, recurse)
        make_adjacent(self.parameters(recurse=False))
        return self

    def weights(self) -> list[nn.Parameter]:
        """Return the weights [o, i], expert by expert."""
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def biases(self) -> list[nn.Parameter]:
        """Return the biases [o], expert by expert; an empty list without bias."""
        count = self.num_gemms if self.uses_bias else 0
        return [getattr(self, f"bias{index}") for index in range(count)]

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Apply map j to its `tokens_per_expert[j]` rows of x [n, i]: [n, o], without bias.

        In layout-invariant mode there is a number of rows for each map and micro batch.
        """
        if self.spec.units is not None:
            weights = _of_microbatches(self.weights(), tokens_per_expert)
            parts = [
                parallel_linear(fill_tiles(rows), weight, None, self.spec)[: len(rows)]
                for rows, weight in zip(split_rows(x, tokens_per_expert), weights, strict=True)
            ]
            return join_rows(parts, x.shape[0])
        return grouped_linear(
            x,
            tokens_per_expert,
            self.weights(),
            self.config.gradient_accumulation_fusion,
            self.quantized,
        )


def _of_microbatches(tensors: Sequence[_T], counts: Sequence[int]) -> list[_T]:
    """Repeat the tensor of each expert for its micro batches, which have the rows `counts`."""
    return [tensor for tensor in tensors for _ in range(len(counts) // len(tensors))]


def grouped_linear(
    x: Tensor,
    tokens_per_expert: Sequence[int],
    weights: Sequence[Tensor],
    fuses_main_grad: bool = True,
    quantized: Sequence[QuantizedLinear] = (),
) -> Tensor:
    """Multiply the rows of each expert with the transpose of its weight.

    Args:
        x: [n, i]; weights: [o, i] each.
        fuses_main_grad: add weight gradients to `main_grad` if a weight has one.
        quantized: low-precision products of each weight; empty to multiply in the dtype of x.
    Returns:
        [n, o].
    """
    if quantized:
        experts = zip(split_rows(x, tokens_per_expert), weights, quantized, strict=True)
        spec = partial(LinearCommSpec, SINGLE_RANK, fuses_main_grad=fuses_main_grad)
        out = [
            parallel_linear(rows, weight, None, spec(quantized=of_weight))
            for rows, weight, of_weight in experts
        ]
        return join_rows(out, x.shape[0])
    if torch.is_autocast_enabled(x.device.type):
        pieces = zip(split_rows(x, tokens_per_expert), weights, strict=True)
        return join_rows([F.linear(rows, weight) for rows, weight in pieces], x.shape[0])
    return _GroupedLinear.apply(x, tokens_per_expert, fuses_main_grad, *weights)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens_per_expert: Sequence[int], fuses: bool, *weights: Tensor
    ) -> Tensor:
        ctx.tokens_per_expert, ctx.fuses = tokens_per_expert, fuses
        # Main gradients are attributes of the parameters, which saved-tensor hooks would replace.
        ctx.weights = weights
        ctx.save_for_backward(x, *weights)
        return grouped_products(x, tokens_per_expert, weights, transposed=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = (
            grouped_products(grad, ctx.tokens_per_expert, weights)
            if ctx.needs_input_grad[0]
            else None
        )
        trained = [i for i in range(len(weights)) if ctx.needs_input_grad[3 + i]]
        parameters = [ctx.weights[i] for i in trained]
        compute = partial(_weight_gradients, ctx.tokens_per_expert, ctx.fuses, grad, x)

        def add() -> None:
            for weight, total in zip(parameters, compute(parameters, trained), strict=True):
                if total is not None:
                    add_gradient(weight, total)

        weight_grads: list[Tensor | None] = [None] * len(weights)
        if trained and not deferred_wgrad.defer_wgrad(add):
            for index, total in zip(trained, compute(parameters, trained), strict=True):
                weight_grads[index] = total
        return grad_x, None, None, *weight_grads


def _weight_gradients(
    counts: Sequence[int], fuses: bool, grad: Tensor, x: Tensor,
    weights: Sequence[Tensor], trained: Sequence[int],
) -> Sequence[Tensor | None]:  # fmt: skip
    """Compute grad.T @ x of the experts `trained`: new tensors [o, i], None for main gradients."""
    if not needs_no_host_counts(x, counts):
        pieces = list(zip(split_rows(grad, counts), split_rows(x, counts), strict=True))
        return [
            _gradient_of_rows(*pieces[index], fuses, weight)
            for index, weight in zip(trained, weights, strict=True)
        ]
    totals = grouped_outer_products(grad, x, counts)
    if len(trained) < len(totals):
        totals = torch.stack([totals[index] for index in trained])
    if fuses and all(map(has_main_grad, weights)):
        accumulate_main_grads(weights, totals)
        return [None] * len(weights)
    return totals.unbind()


def _gradient_of_rows(grad: Tensor, rows: Tensor, fuses: bool, weight: Tensor) -> Tensor | None:
    """Compute grad.T @ rows [o, i] in the main gradient (and return None), or as a new tensor."""
    if fuses and has_main_grad(weight):
        # Without rows nothing is added; a gradient that stays fresh counts as zero.
        if len(rows):
            main_grad_addmm(weight, fill_tiles(grad).t(), fill_tiles(rows))
        return None
    return fill_tiles(grad).t() @ fill_tiles(rows) if len(rows) else torch.zeros_like(weight)


class _StackedBiases(torch.autograd.Function):
    """Stacks biases [o] to [l, o]; one sum adds the gradients to all main gradients."""

    @staticmethod
    def forward(ctx: Any, *biases: Tensor) -> Tensor:
        ctx.biases = biases
        return torch.stack(biases)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if all(ctx.needs_input_grad) and all(map(has_main_grad, ctx.biases)):
            accumulate_main_grads(ctx.biases, grad)
            return (None,) * len(grad)
        return grad.unbind()


def rows_with_bias(
    x: Tensor,
    tokens_per_expert: Sequence[int],
    biases: Sequence[Tensor],
    scale: Tensor | None = None,
    *,
    is_exact: bool = False,
) -> Tensor:
    """Add to the rows [n, o] of each expert its bias [o], times `scale` [n] if given.

    Args:
        is_exact: gradients are exact sums, and there is a number of rows for each expert and micro
            batch.
    """
    if is_exact:
        of_rows = zip(_of_microbatches(biases, tokens_per_expert), tokens_per_expert, strict=True)
        added = torch.cat([in_rows(bias, torch.Size((n, len(bias)))) for bias, n in of_rows])
    else:
        counts = counts_on_device(tokens_per_expert, x.device)
        # Gradients of padding rows are undefined; they are added to a dummy bias that is dropped.
        stacked = F.pad(_StackedBiases.apply(*biases), (0, 0, 0, 1))
        added = stacked.index_select(0, group_of_row(counts, x.shape[0]))
    return x + (added if scale is None else (added * scale[:, None]).to(x.dtype))
