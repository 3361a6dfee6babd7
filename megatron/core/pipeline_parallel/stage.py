"""Forward and backward of one model chunk, and the checks of the user's forward step and loss.

A stage is independent of schedules and of other ranks: it maps input tensors to output tensors, and
output gradients to input gradients. For each micro batch it keeps only its inputs (autograd leaves)
and the edges into the autograd graph of its outputs. The caller owns the outputs and frees them
once they are sent: backward needs their graph, not their data.

The checks of the results of a forward step and a loss function read types and shapes, never values,
so they never wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, DataError, shown
from megatron.core.step_context.context import (
    AuxLossScale,
    WeightGradient,
    current_step,
    within_step,
)
from megatron.core.step_context.deferred_wgrad import capture_wgrads
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.utils import get_attr_wrapped_model, unwrap_model


@dataclass(kw_only=True)
class LossSettings:
    """How the last stage scales the result of the loss function for backward.

    Attributes:
        num_microbatches: the loss is divided by it, unless `per_token`.
        cp_group: ranks that share each micro batch's tokens. Gradients are averaged over these
            ranks later, so the loss of one rank is multiplied by cp.
        per_token: gradients will be divided by the number of tokens of the whole batch instead.
        tokens_per_microbatch: number of tokens [] of the whole batch divided by the micro batches
            of all replicas, if it is known before the step; see `AuxLossScale`.
        collect_non_loss_data: call the loss function with `non_loss_data=True` and only collect.
        scale: applied to the loss before its backward (fp16), or None.
        exact_scale: with `layout_invariant_mode` a power of two, the factor of each micro batch's
            loss instead of all others: it depends on the global batch alone.
    """

    num_microbatches: int
    cp_group: Group
    per_token: bool = False
    tokens_per_microbatch: Tensor | None = None
    collect_non_loss_data: bool = False
    scale: Callable[[Tensor], Tensor] | None = None
    exact_scale: float | None = None


@dataclass
class StepReport:
    """Results of a step, filled on the last stage.

    Attributes:
        entries: reports of the loss function, one per micro batch.
        num_tokens: sum of the token counts (int tensor []); None on other stages.
    """

    entries: list[Any] = field(default_factory=list)
    num_tokens: Tensor | None = None


class PipelineStage(Protocol):
    """The calls that an executor makes."""

    def forward(self, microbatch: int, inputs: list[Tensor] | None) -> list[Tensor]:
        """Run one micro batch forward: inputs and outputs [s, b, h]."""

    def backward(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Run one micro batch backward: gradients [s, b, h]."""

    def input_grad(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Compute the input gradients [s, b, h], without weight gradients."""

    def weight_grad(self, microbatch: int) -> None:
        """Compute the weight gradients of one micro batch, after its `input_grad`."""


class Stage:
    """A model chunk with the calls of one training step bound to it.

    Args:
        model: the chunk, possibly wrapped.
        forward_step: (data_iterator, model) -> (output, loss function).
        data_iterator: first argument of `forward_step`.
        is_last: whether this is the last stage of the model, which computes the loss.
        loss: see `LossSettings`.
        reported: collects the reports of the loss function.
        trains: whether every forward will be followed by a backward.
        keep_outputs: keep references to outputs until backward instead of only their graph.
        renews_weight_cache: weights have changed since the last step: the first forward calls the
            model's `set_is_first_microbatch`, if it has one.
        autocast_dtype: run forwards under autocast with this dtype, or None.
    """

    def __init__(
        self,
        model: Any,
        forward_step: Callable[..., Any],
        data_iterator: object,
        *,
        is_last: bool,
        loss: LossSettings,
        reported: StepReport,
        trains: bool = True,
        keep_outputs: bool = False,
        renews_weight_cache: bool = True,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.is_last = is_last
        self._forward_step = forward_step
        self._data_iterator = data_iterator
        self._loss = loss
        self._reported = reported
        self._trains = trains
        self._keep_outputs = keep_outputs
        self._is_first = renews_weight_cache
        self._autocast_dtype = autocast_dtype
        self._set_input: Callable[[Any], None] | None = None
        self._inputs: dict[int, list[Tensor]] = {}
        self._edges: dict[int, list[Any]] = {}
        self._weight_gradients: dict[int, list[WeightGradient]] = {}

    def forward(self, microbatch: int, inputs: list[Tensor] | None) -> list[Tensor]:
        """Run the chunk on one micro batch.

        Args:
            inputs: activations [s, b, h] of the previous stage (leaves that require grad, when
                training), or None on the first stage of the model.
        Returns:
            the outputs for the next stage; empty on the last stage.
        """
        if inputs is not None:
            if self._set_input is None:
                self._set_input = get_attr_wrapped_model(self.model, "set_input_tensor")
            self._set_input(inputs[0] if len(inputs) == 1 else inputs)
        if self._is_first:
            self._is_first = False
            announce = getattr(unwrap_model(self.model), "set_is_first_microbatch", None)
            if announce is not None:
                announce()
        # The weight of auxiliary losses, which arise inside the model.
        settings = self._loss
        factor = settings.cp_group.size() / settings.num_microbatches
        if settings.per_token or settings.exact_scale is not None:
            factor = settings.exact_scale or 1.0
        current_step().aux_loss_scale = AuxLossScale(
            factor, settings.per_token, settings.tokens_per_microbatch, settings.scale
        )
        mtp_losses: dict[str, Tensor] | None = {} if self.is_last and self._trains else None
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._autocast_dtype is not None:
            autocast = torch.autocast(device.device_type(), dtype=self._autocast_dtype)
        with autocast, within_step(mtp_losses=mtp_losses):
            output, loss_function = call_forward_step(
                self._forward_step, self._data_iterator, self.model, is_last=self.is_last
            )
            if self.is_last:
                return self._finish_model(microbatch, inputs, output, loss_function)
        outputs = list(output) if isinstance(output, (list, tuple)) else [output]
        self._remember(microbatch, inputs, outputs)
        return outputs

    def backward(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Accumulate parameter gradients of one micro batch and return the input gradients.

        Args:
            output_grads: [s, b, h], one per output; None on the last stage, which starts from its
                loss.
        Returns:
            one gradient per input, zeros where the chunk did not use it; empty on the first stage.
        """
        edges = self._edges.pop(microbatch)
        inputs = self._inputs.pop(microbatch, None)
        if output_grads is None:
            loss = edges[0]
            if self._loss.scale is not None:
                loss = self._loss.scale(loss)
            if loss.requires_grad:
                torch.autograd.backward(loss)
        else:
            pairs = [(e, g) for e, g in zip(edges, output_grads, strict=True) if e is not None]
            if pairs:
                _run_backward(*zip(*pairs, strict=True))
        if inputs is None:
            return []
        grads = [x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs]
        return [grad.detach() for grad in grads]

    def input_grad(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Return gradients [s, b, h] of the inputs; `weight_grad` computes the weight gradients."""
        calls: list[WeightGradient] = []
        with capture_wgrads(calls):
            grads = self.backward(microbatch, output_grads)
        self._weight_gradients[microbatch] = calls
        return grads

    def weight_grad(self, microbatch: int) -> None:
        """Accumulate the weight gradients that `input_grad` deferred."""
        calls = self._weight_gradients.pop(microbatch)
        calls.reverse()
        with torch.no_grad():
            while calls:
                calls.pop()()

    def _remember(
        self, microbatch: int, inputs: list[Tensor] | None, outputs: list[Tensor]
    ) -> None:
        if not self._trains:
            return
        if inputs is not None:
            self._inputs[microbatch] = inputs
        if self._keep_outputs:
            self._edges[microbatch] = [o if o.requires_grad else None for o in outputs]
        else:
            self._edges[microbatch] = [_edge_of(o) if o.requires_grad else None for o in outputs]

    def _finish_model(
        self, microbatch: int, inputs: list[Tensor] | None, output: Any, loss_function: Any
    ) -> list[Tensor]:
        """Compute the loss of one micro batch, and remember it for backward."""
        settings, reported = self._loss, self._reported
        cp_size = settings.cp_group.size()
        if settings.collect_non_loss_data:
            reported.entries.append(loss_function(output, non_loss_data=True))
            return []
        loss, num_tokens, entry = loss_parts(
            loss_function(output), output, per_token=settings.per_token, trains=self._trains
        )
        factor, divisor = float(cp_size), settings.num_microbatches
        if settings.exact_scale is not None:
            factor, divisor = settings.exact_scale, 1
        if num_tokens is None:
            loss = loss * factor / divisor
        elif settings.per_token:
            total = reported.num_tokens
            counted = num_tokens.detach().to(torch.int)
            reported.num_tokens = counted if total is None else total + counted
            loss = loss * (settings.exact_scale or 1.0)
        else:
            # Divide by the tokens of all `cp` ranks: a mean of the ranks' means would give the
            # tokens of ranks that hold few of them a larger weight.
            if cp_size > 1:
                num_tokens = torch_collectives.all_reduce(
                    num_tokens.detach().clone(), settings.cp_group
                )
            # Without any token the loss is 0, not 0 / 0.
            loss = loss * factor / num_tokens.clamp(min=1) / divisor
        mtp_losses = current_step().mtp_losses
        if mtp_losses and isinstance(entry, Mapping):
            entry = {**entry, **mtp_losses}
        reported.entries.append(entry)
        if self._trains:
            if inputs is not None:
                self._inputs[microbatch] = inputs
            self._edges[microbatch] = [loss]
        return []


def _edge_of(output: Tensor) -> Any:
    """Return the edge of the graph that computed a tensor; it outlives the tensor.

    In versions of torch without `ownership_token`, the edge of a Python autograd function does not
    keep the node of the function alive. The node of a view is a C++ node, which does.
    """
    keeps_node = "ownership_token" in GradientEdge._fields
    return get_gradient_edge(output if keeps_node else output.view_as(output))


def _run_backward(edges: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Backpropagate from graph edges whose output tensors may be gone.

    `torch.autograd.backward` takes edges only in recent versions of torch; the engine below it
    takes edges in all supported versions.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


_LOSS_FORMS = (
    "it returns (summed loss, number of tokens, report), (mean loss, report), or the mean loss"
    " alone; a loss is a floating-point tensor of one element, a number of tokens a tensor of one"
    " element"
)


def call_forward_step(
    forward_step: Callable[..., object], data_iterator: object, model: object, *, is_last: bool
) -> tuple[Any, Any]:
    """Call the forward step for one micro batch; return (output, loss function).

    Args:
        is_last: whether the chunk computes the loss. The output of any other chunk is one or more
            tensors [s, b, h].
    Raises:
        ConfigError: the forward step returned anything else.
        DataError: the data iterator had no batch left.
    """
    try:
        result: Any = forward_step(data_iterator, model)
    except StopIteration:
        raise DataError(
            "the data iterator ended before the last micro batch of the step.",
            rule="every step takes num_microbatches batches from the iterator of each chunk",
            fix="use an iterator that starts again at the end of the data, or fewer steps",
        ) from None
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    output: Any
    output, loss_function = result if is_pair else (None, None)
    parts = output if isinstance(output, (tuple, list)) else (output,)
    if not is_pair:
        found = _described(result)
    elif is_last and not callable(loss_function):
        found = f"{_described(loss_function)} for the loss function"
    elif not (is_last or (parts and all(isinstance(part, Tensor) for part in parts))):
        found = f"{_described(output)} for the output of an earlier stage"
    else:
        return output, loss_function
    raise ConfigError(
        f"the forward step returned {found}.",
        rule="it returns (output, loss function); the output of all stages but the last is a tensor"
        " or a list of tensors",
        fix="return the model's output and a function of this output, such as"
        " partial(loss_func, loss_mask)",
    )


def loss_parts(
    result: object, output: object, *, per_token: bool, trains: bool
) -> tuple[Tensor, Tensor | None, Any]:
    """Split the result of a loss function into (loss [], number of tokens [] or None, report).

    Args:
        output: the argument of the loss function.
        per_token: gradients will be divided by the number of tokens of the whole batch.
        trains: the loss will be differentiated.
    Raises:
        ConfigError: the result has another form, or does not fit `per_token`.
    """
    if isinstance(result, Tensor):
        result = (result, result.detach())
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
        raise _wrong_loss(_described(result))
    loss, report = result[0], result[-1]
    num_tokens: Tensor | None = result[1] if len(result) == 3 else None
    if not _is_single(loss) or not loss.is_floating_point():
        raise _wrong_loss(f"{_described(loss)} for the loss")
    if len(result) == 3 and not (_is_single(num_tokens) and num_tokens.dtype is not torch.bool):
        raise _wrong_loss(f"{_described(num_tokens)} for the number of tokens")
    if num_tokens is None and (type(report) is int or _is_single(report) and _is_integer(report)):
        raise _wrong_loss(f"{_described(report)}, which is a number of tokens, for the report")
    if not trains:
        return loss, num_tokens, report
    if num_tokens is None and per_token:
        raise ConfigError(
            "calculate_per_token_loss is on, and the loss function returned no number of tokens.",
            rule="gradients are summed over micro batches and ranks, then divided by the tokens of"
            " the whole batch: without a number of tokens they would grow with the number of ranks",
            flags=["--calculate-per-token-loss"],
            fix="return (summed loss, number of tokens, report), or leave calculate_per_token_loss"
            " off",
        )
    parts = output if isinstance(output, (tuple, list)) else (output,)
    has_gradient = any(isinstance(part, Tensor) and part.requires_grad for part in parts)
    if has_gradient and not loss.requires_grad:
        raise ConfigError(
            "the loss does not depend on the model's output, which requires a gradient.",
            rule="backward starts at the loss that the loss function returns",
            fix="compute the loss from the output without detach(), item() or no_grad; where no"
            " token counts, return output.sum() * 0",
        )
    return loss, num_tokens, report


def _is_single(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_integer(value: Tensor) -> bool:
    return not value.is_floating_point() and value.dtype is not torch.bool


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return shown(value)


def _wrong_loss(found: str) -> ConfigError:
    return ConfigError(
        f"the loss function returned {found}.", rule=_LOSS_FORMS, fix="return one of these forms"
    )
