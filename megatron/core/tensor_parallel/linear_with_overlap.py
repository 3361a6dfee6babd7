"""A linear map with its tensor-parallel communication, overlapped with the weight gradient.

Forward may gather its input (sequence parallelism) or reduce its output (row-parallel layers).
Backward starts the collective of the input gradient, computes the weight gradient meanwhile, and
writes weight and bias gradients directly into the main gradients if a data-parallel wrapper
provides them (see the protocol in `param_meta`).

Shapes: `s` sequence, `b` micro batch, `i`/`o` input/output features of this rank, `t` = s*b.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.cpu.prepacked_weights import linear
from megatron.core.kernels.weight_gradient import main_grad_addmm
from megatron.core.low_precision.quantized_linear import GemmContext, QuantizedLinear
from megatron.core.parameters.exact_sum import on_grid, row_sum
from megatron.core.parameters.param_meta import (
    accumulate_main_grad,
    add_gradient,
    has_main_grad,
)
from megatron.core.process_groups_config import resolve_group
from megatron.core.step_context import deferred_wgrad
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.unit_products import Units
from megatron.core.topology.group import Group
from megatron.core.transport import collectives


class InputMode(Enum):
    """Communication of the input of the linear map."""

    LOCAL = "local"
    """Nothing, forward or backward: the input is this rank's own (row-parallel layers)."""
    REPLICATED = "replicated"
    """All ranks hold the same input; backward all-reduces its gradient."""
    SEQUENCE_SHARD = "sequence_shard"
    """Ranks hold rows [s/tp, b, i]; forward gathers them, backward reduce-scatters. The gathered
    input is not kept: backward gathers it again, overlapped with the input-gradient GEMM."""


class OutputMode(Enum):
    """Communication of the output of the linear map."""

    LOCAL = "local"
    """Nothing: the output is this rank's own (column-parallel layers)."""
    ALL_REDUCE = "all_reduce"
    """Partial sums are added over the ranks."""
    REDUCE_SCATTER = "reduce_scatter"
    """Partial sums are added, each rank keeping rows [s/tp, b, o]; backward gathers."""


@dataclass(frozen=True)
class LinearCommSpec:
    """Settings of one linear layer, the same for all calls."""

    group: Group
    """Tensor-parallel group; with one rank the modes do nothing."""
    input_mode: InputMode = InputMode.LOCAL
    output_mode: OutputMode = OutputMode.LOCAL
    fuses_main_grad: bool = True
    """Write weight and bias gradients into `main_grad` where the parameter has one."""
    overlaps: bool = True
    """Overlap the input-gradient collective with the weight-gradient GEMM."""
    quantized: QuantizedLinear | None = None
    """Low-precision products; None multiplies in the dtype of the tensors."""
    units: Units | None = None
    """Products in units that all layouts share (`layout_invariant_mode`)."""

    @cached_property
    def communicates(self) -> bool:
        """Whether any collective happens."""
        return self.group.size() > 1 and (
            self.input_mode is not InputMode.LOCAL or self.output_mode is not OutputMode.LOCAL
        )


def parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearCommSpec) -> Tensor:
    """Compute x @ weight.T + bias with the communication of `spec`.

    Args:
        x: [s, b, i] (or any leading dimensions); [s/tp, b, i] for SEQUENCE_SHARD.
        weight: [o, i], this rank's shard.
        bias: [o] or None; added once, after the reduction of the output.
    Returns:
        [s, b, o]; [s/tp, b, o] for REDUCE_SCATTER.
    Communication:
        decided by the two modes, on `spec.group`.
    """
    communicates = spec.communicates and x.numel() > 0
    if spec.units is not None:
        return _ParallelLinear.apply(x, weight, bias, spec, communicates, False)
    if spec.quantized is not None:
        records = torch.is_grad_enabled()
        return _ParallelLinear.apply(x, weight, bias, spec, communicates, records)
    if not communicates and not torch.is_grad_enabled():
        return linear(x, weight, bias)
    writes_main_grad = spec.fuses_main_grad and (
        has_main_grad(weight) or (bias is not None and has_main_grad(bias))
    )
    if not communicates and not (writes_main_grad or deferred_wgrad.wgrad_deferral_enabled()):
        # torch's own linear layer suffices, and its C++ autograd is fastest.
        return linear(x, weight, bias)
    if torch.is_autocast_enabled(x.device.type):
        return _composed_linear(x, weight, bias, spec)
    return _ParallelLinear.apply(x, weight, bias, spec, communicates, False)


def _composed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearCommSpec
) -> Tensor:
    """The same from separate operations: autocast then applies to `F.linear`."""
    if spec.input_mode is InputMode.REPLICATED:
        x = mappings.copy_to_tensor_model_parallel_region(x, spec.group)
    elif spec.input_mode is InputMode.SEQUENCE_SHARD:
        x = mappings.gather_from_sequence_parallel_region(x, group=spec.group)
    if spec.output_mode is OutputMode.LOCAL:
        return F.linear(x, weight, bias)
    out = F.linear(x, weight)
    if spec.output_mode is OutputMode.ALL_REDUCE:
        out = mappings.reduce_from_tensor_model_parallel_region(out, spec.group)
    else:
        out = mappings.reduce_scatter_to_sequence_parallel_region(out, spec.group)
    return out if bias is None else out + bias.to(out.dtype)


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        spec: LinearCommSpec,
        communicates: bool,
        records_amax: bool,
    ) -> Tensor:
        ctx.spec, ctx.communicates = spec, communicates
        # The main gradients are attributes of the parameter objects, which saved-tensor hooks
        # (activation recompute, offload) would replace; other tensors are saved as usual.
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(x, weight)

        input_mode = spec.input_mode if communicates else InputMode.LOCAL
        output_mode = spec.output_mode if communicates else OutputMode.LOCAL
        if input_mode is InputMode.SEQUENCE_SHARD:
            x = collectives.all_gather(x, spec.group)
        ctx.context = None
        if spec.quantized is not None:
            shards = None
            if InputMode.SEQUENCE_SHARD is input_mode or output_mode is OutputMode.REDUCE_SCATTER:
                shards = spec.group
            ctx.context = spec.quantized.context(x, shards, records_amax)
            out = spec.quantized.forward(x, weight, ctx.context)
            if output_mode is OutputMode.LOCAL:
                return out if bias is None else out.add_(bias)
        elif spec.units is not None:
            out = spec.units.forward(x.reshape(-1, x.shape[-1]), weight)
            out = out.view(*x.shape[:-1], out.shape[-1])
            if output_mode is OutputMode.LOCAL:
                out = out.to(x.dtype)
                return out if bias is None else out.add_(bias)
        elif output_mode is OutputMode.LOCAL:
            return linear(x, weight, bias)
        else:
            out = linear(x, weight, None).contiguous()
        if output_mode is OutputMode.ALL_REDUCE:
            out = collectives.all_reduce(out, spec.group)
        else:
            out = collectives.reduce_scatter(out, spec.group)
        out = out.to(x.dtype)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spec: LinearCommSpec = ctx.spec
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        input_mode = spec.input_mode if ctx.communicates else InputMode.LOCAL
        bias_rows = grad.reshape(-1, grad.shape[-1])
        if ctx.communicates and spec.output_mode is OutputMode.REDUCE_SCATTER:
            grad = collectives.all_gather(grad, spec.group)

        # Only a parameter has a place for a later gradient; a converted weight has not.
        may_wait = needs_weight and ctx.weight.is_leaf
        waits = may_wait and deferred_wgrad.defer_wgrad(
            partial(_deferred_weight_gradient, ctx.weight, grad, x, spec, input_mode, ctx.context)
        )
        needs_weight = needs_weight and not waits
        gathering = None
        if needs_weight and input_mode is InputMode.SEQUENCE_SHARD:
            gathering = collectives.start_all_gather(x, spec.group)

        grad_x, reducing = None, None
        if needs_input:
            grad_x = _input_gradient(grad, weight, spec, ctx.context)
            if input_mode is InputMode.REPLICATED:
                reducing = collectives.start_all_reduce(grad_x, spec.group)
            elif input_mode is InputMode.SEQUENCE_SHARD:
                reducing = collectives.start_reduce_scatter(grad_x, spec.group)
            if reducing is not None and not spec.overlaps:
                grad_x, reducing = reducing.wait(), None

        grad_weight = grad_bias = None
        if needs_weight:
            if gathering is not None:
                x = gathering.wait()
            grad_weight = _weight_gradient(ctx.weight, grad, x, spec, ctx.context)
        if needs_bias:
            # With a scattered output each rank has its own rows: the sum is partial over the group,
            # as the parameter's `partial_grad_axes` states.
            grad_bias = _bias_gradient(ctx.bias, bias_rows, spec)
        if reducing is not None:
            grad_x = reducing.wait()
        if grad_x is not None:
            grad_x = grad_x.to(x.dtype)  # sums of units are fp32
        return grad_x, grad_weight, grad_bias, None, None, None


def _input_gradient(
    grad: Tensor, weight: Tensor, spec: LinearCommSpec, context: GemmContext | None
) -> Tensor:
    """Compute grad [..., o] @ weight [o, i]: [..., i]."""
    if spec.quantized is not None:
        assert context is not None
        return spec.quantized.input_gradient(grad, weight, context)
    rows = grad.reshape(-1, grad.shape[-1])  # [t, o]
    if spec.units is not None:
        return spec.units.input_gradient(rows, weight).view(*grad.shape[:-1], weight.shape[1])
    return (rows @ weight).view(*grad.shape[:-1], weight.shape[1])


def _weight_gradient(
    weight: Tensor, grad: Tensor, x: Tensor, spec: LinearCommSpec, context: GemmContext | None
) -> Tensor | None:
    """Compute grad.T @ x [o, i] in the main gradient (and return None), or as a new tensor."""
    fuses = spec.fuses_main_grad and has_main_grad(weight)
    if spec.quantized is not None:
        assert context is not None
        total = spec.quantized.weight_gradient(grad, x, context)
        if fuses:
            accumulate_main_grad(weight, total)
        return None if fuses else total
    grad, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    if spec.units is not None:
        total = spec.units.weight_gradient(grad, rows)
        if fuses:
            accumulate_main_grad(weight, total)
        return None if fuses else on_grid(total)
    if fuses:
        main_grad_addmm(weight, grad.t(), rows)
        return None
    return grad.t() @ rows


def _deferred_weight_gradient(
    weight: Tensor,
    grad: Tensor,
    x: Tensor,
    spec: LinearCommSpec,
    input_mode: InputMode,
    context: GemmContext | None,
) -> None:
    """Compute a weight gradient after its backward pass, and store it as the pass would have."""
    if input_mode is InputMode.SEQUENCE_SHARD:
        x = collectives.all_gather(x, spec.group)
    total = _weight_gradient(weight, grad, x, spec, context)
    if total is not None:
        add_gradient(weight, total)


def _bias_gradient(bias: Tensor, grad: Tensor, spec: LinearCommSpec) -> Tensor | None:
    """Sum the rows of grad [t, o] into the main gradient (and return None), or a new tensor."""
    total = grad.sum(0) if spec.units is None else row_sum(grad)
    if spec.fuses_main_grad and has_main_grad(bias):
        accumulate_main_grad(bias, total)
        return None
    return total


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: Group | None = None,
) -> Tensor:
    """Compute a column-parallel linear map; Megatron's name and arguments for `parallel_linear`.

    Args:
        input: [s, b, i], or [s/tp, b, i] with `sequence_parallel`.
        weight: [o/tp, i]; it may be frozen.
        gradient_accumulation_fusion: write into `weight.main_grad` where it exists.
        allreduce_dgrad: sum the input gradient over the group (excludes `sequence_parallel`).
        sequence_parallel: gather the input, reduce-scatter its gradient.
        grad_output_buffer: deferred weight gradients are not supported; must be None.
        async_grad_allreduce: old name of `allreduce_dgrad`, which it overrides if given.
        tp_group: None is the tensor-parallel group of the current collection.
    Returns:
        [s, b, o/tp].
    """
    if grad_output_buffer is not None:
        raise deferral_is_not_supported()
    if async_grad_allreduce is not None:
        allreduce_dgrad = async_grad_allreduce
    if allreduce_dgrad and sequence_parallel:
        raise ConfigError(
            "allreduce_dgrad and sequence_parallel are both set.",
            rule="the reduce-scatter of sequence parallelism sums the input gradient already",
            fix="pass allreduce_dgrad=False",
        )
    mode = InputMode.LOCAL
    if sequence_parallel:
        mode = InputMode.SEQUENCE_SHARD
    elif allreduce_dgrad:
        mode = InputMode.REPLICATED
    group = resolve_group(tp_group, "tp")
    spec = LinearCommSpec(group, input_mode=mode, fuses_main_grad=gradient_accumulation_fusion)
    return parallel_linear(input, weight, bias, spec)


def deferral_is_not_supported() -> ConfigError:
    """Return the error for callers that pass a buffer of deferred gradients."""
    return ConfigError(
        "a buffer for deferred weight gradients was passed to a linear layer.",
        rule="weight gradients are computed in the backward pass of their layer",
        flags=["--defer-embedding-wgrad-compute"],
        fix="drop --defer-embedding-wgrad-compute",
    )
