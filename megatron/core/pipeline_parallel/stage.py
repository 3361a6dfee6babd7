"""One model chunk as a pipeline sees it: forward, backward, and what it must remember between.

A stage knows nothing of schedules or of other ranks. It is given input tensors, hands out output
tensors, is given output gradients, hands out input gradients. It keeps, per micro batch, only its
inputs (autograd leaves) and the edges into the autograd graph of its outputs. Outputs themselves
belong to the caller, who frees them once they are sent: backward needs their graph, not their
data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.foundation import device
from megatron.core.pipeline_parallel.callback_contract import call_forward_step, loss_parts
from megatron.core.step_context.aux_loss import set_aux_loss_scale
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
    """How the last stage turns what the loss function returns into a loss to differentiate.

    Attributes:
        num_microbatches: the loss is divided by it, unless `per_token`.
        cp_group: ranks that share each micro batch's tokens. Gradients are averaged over them
            later, so a rank's share of a mean over all their tokens counts cp times.
        per_token: gradients will be divided by the number of tokens of the whole batch instead.
        tokens_per_microbatch: that number [] divided by the micro batches of all replicas, if it is
            known before the step; see `AuxLossScale`.
        collect_non_loss_data: call the loss function with `non_loss_data=True` and only collect.
        scale: applied to the loss before its backward (fp16), or None.
    """

    num_microbatches: int
    cp_group: Group
    per_token: bool = False
    tokens_per_microbatch: Tensor | None = None
    collect_non_loss_data: bool = False
    scale: Callable[[Tensor], Tensor] | None = None

    def aux_loss_scale(self) -> AuxLossScale:
        """Return how losses that arise inside the model are weighted beside this one."""
        factor = self.cp_group.size() / self.num_microbatches
        return AuxLossScale(factor, self.per_token, self.tokens_per_microbatch, self.scale)


@dataclass
class StepReport:
    """What the last stage of a pipeline has to say about a step.

    Attributes:
        entries: what the loss function reported, one entry per micro batch.
        num_tokens: sum of the token counts (int tensor []); zero on other stages.
    """

    entries: list[Any] = field(default_factory=list)
    num_tokens: Tensor | None = None


class PipelineStage(Protocol):
    """What an executor drives."""

    def forward(self, microbatch: int, inputs: list[Tensor] | None) -> list[Tensor]:
        """Run one micro batch forward: inputs and outputs [s, b, h]."""

    def backward(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Run one micro batch backward: gradients [s, b, h]."""

    def input_grad(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Compute the gradients [s, b, h] that the previous stage waits for."""

    def weight_grad(self, microbatch: int) -> None:
        """Run what `input_grad` has left of one micro batch."""


class Stage:
    """A model chunk with the calls of one training step bound to it.

    Args:
        model: the chunk, possibly wrapped.
        forward_step: (data_iterator, model) -> (output, loss function).
        data_iterator: passed through.
        is_last: whether this is the last stage of the model, which computes the loss.
        loss: see `LossSettings`.
        reported: receives what the loss function reports.
        trains: whether every forward will be followed by a backward.
        keep_outputs: keep references to outputs until backward instead of only their graph.
        renews_weight_cache: whether the first forward tells the model (if it listens, through
            `set_is_first_microbatch`) that weights have changed since the last step.
        autocast_dtype: run forwards under autocast with this dtype, or None.
    """

    def __init__(
        self,
        model: Any,
        forward_step: Callable[..., Any],
        data_iterator: Any,
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
        set_aux_loss_scale(self._loss.aux_loss_scale())
        later: dict[str, Tensor] | None = {} if self.is_last and self._trains else None
        with self._autocast(), within_step(later_losses=later):
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
        """Return gradients [s, b, h] of the inputs; leave those of weights to `weight_grad`."""
        calls: list[WeightGradient] = []
        with capture_wgrads(calls):
            grads = self.backward(microbatch, output_grads)
        self._weight_gradients[microbatch] = calls
        return grads

    def weight_grad(self, microbatch: int) -> None:
        """Accumulate the weight gradients that `input_grad` has left of one micro batch."""
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
        if num_tokens is None:
            loss = loss * cp_size / settings.num_microbatches
        elif settings.per_token:
            total = reported.num_tokens
            counted = num_tokens.detach().to(torch.int)
            reported.num_tokens = counted if total is None else total + counted
        else:
            # A micro batch without a token to learn from has loss 0, not 0 / 0.
            shared = self._over_context_parallel(num_tokens)
            loss = loss * cp_size / shared.clamp(min=1) / settings.num_microbatches
        later = current_step().later_losses
        reported.entries.append(
            {**entry, **later} if later and isinstance(entry, Mapping) else entry
        )
        if self._trains:
            if inputs is not None:
                self._inputs[microbatch] = inputs
            self._edges[microbatch] = [loss]
        return []

    def _over_context_parallel(self, num_tokens: Tensor) -> Tensor:
        """Return the tokens that count in the whole micro batch, of which ranks hold parts.

        A mean of the ranks' means would weigh a token by how many others its rank happens to hold.
        """
        if self._loss.cp_group.size() == 1:
            return num_tokens
        total = num_tokens.detach().clone()
        return torch_collectives.all_reduce(total, self._loss.cp_group)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return _NOTHING
        return torch.autocast(device.device_type(), dtype=self._autocast_dtype)


_NOTHING = contextlib.nullcontext()


def _edge_of(output: Tensor) -> Any:
    """Return the edge of the graph that computed a tensor; it outlives the tensor.

    Before torch has `ownership_token`, the edge of a Python function does not keep that function's
    node. The node of a view is not Python's, and keeps what comes before it.
    """
    keeps_node = "ownership_token" in GradientEdge._fields
    return get_gradient_edge(output if keeps_node else output.view_as(output))


def _run_backward(edges: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Backpropagate from graph edges whose output tensors may be gone.

    `torch.autograd.backward` takes edges only in recent versions of torch; the engine below it
    takes them in all that we support.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
