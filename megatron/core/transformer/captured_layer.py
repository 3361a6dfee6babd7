"""Layers as captured graphs: one launch for a forward pass, one for a backward pass.

A layer is captured once for each micro batch in flight, because the tensors that forward saves for
backward stay at the addresses of the capture. The two graphs of a micro batch share memory. Graphs
of different layers do not: a backward pass is captured right after its forward pass, but replayed
after the forward passes of later layers, which would overwrite the memory that it frees.

Layers with work that a replay does not repeat are not captured: draws of random numbers, reads by
the host, Python that runs within the layer (`why_not_captured`). Weight gradients are outputs of a
graph; hooks add them to the main gradient outside of it, because Python decides whether they are
the first of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron.core.foundation import device, device_graph
from megatron.core.foundation.device_graph import DeviceGraph, MemoryPool, Outputs
from megatron.core.foundation.errors import ScheduleError
from megatron.core.parameters.param_meta import has_main_grad
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.step_context.context import current_step
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

_OWN = "megatron."


def why_not_captured(config: TransformerConfig) -> str:
    """Return why no layer of a model can be captured, or ""."""
    reasons = {
        "dropout draws from numbers of the host, which a replay would repeat":
            config.hidden_dropout > 0 or config.attention_dropout > 0,
        "recomputed activations run backward passes of their own":
            config.recompute_granularity is not None,
        "Python updates the scales of --fp8-format and --fp4-format": config.fp8 or config.fp4,
        "each copy of activations to the host is written to new memory":
            config.offloads_activations,
        "--qk-clip collects logits in Python": config.qk_clip,
        "layers that share chosen keys exchange them in Python": config.dsa_indexer_topk_freq > 1,
        "layers that share keys and values exchange them in Python": config.num_kv_shared_layers
            or config.kv_source_layers is not None,
        "a layer that is captured reads no vectors of its own": config.per_layer_embed_dim,
        "a schedule that defers weight gradients computes them after backward":
            schedule_named(config.pipeline_schedule).splits_backward
            or config.overlap_moe_expert_parallel_comm,
    }  # fmt: skip
    return next((why for why, holds in reasons.items() if holds), "")


def captured_layers(layers: Sequence[Any], config: TransformerConfig) -> list[CapturedLayer | None]:
    """Return for each layer of a stage its `CapturedLayer`, None for layers that stay eager.

    Layers with experts stay eager because the host reads the number of rows of each expert; layers
    with parameters of other libraries, because their kernels may not be capturable.
    """
    found: list[CapturedLayer | None] = [None] * len(layers)
    if not config.captures_layers or why_not_captured(config):
        return found
    for index, layer in enumerate(layers):
        kind = config.layer_kind(layer.layer_number)
        if (
            kind.attends
            and not kind.recurrence
            and not any(_keeps_it_eager(part) for part in layer.modules())
        ):
            found[index] = CapturedLayer(layer, config.cuda_graph_warmup_steps)
    return found


def _keeps_it_eager(part: nn.Module) -> bool:
    owns = next(part.parameters(recurse=False), None) is not None
    return isinstance(part, MoELayer) or (owns and not type(part).__module__.startswith(_OWN))


@dataclass
class _Slot:
    """The graphs of a layer for one micro batch in flight.

    Attributes:
        inputs: static inputs of the forward pass, copied in before a replay.
        outputs, output_gradients: static memory; gradients: of inputs and parameters.
    """

    number: int
    forward: DeviceGraph
    backward: DeviceGraph
    inputs: list[Tensor]
    outputs: Outputs
    output_gradients: list[Tensor]
    gradients: Outputs


class _Lease:
    """Holds a slot from its forward to its backward pass, or until autograd drops the graph."""

    def __init__(self, slot: _Slot, free: list[tuple[int, int, _Slot]]) -> None:
        self._slot: _Slot | None = slot
        self._free = free

    def slot(self) -> _Slot:
        """Return the slot; raise after its backward pass."""
        if self._slot is None:
            raise ScheduleError(
                "a second backward pass of a captured layer.",
                rule="the next micro batch overwrites the tensors that forward saved",
                fix="drop --cuda-graph-impl, or call backward once",
            )
        return self._slot

    def end(self) -> None:
        """Release the slot for another micro batch."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            heapq.heappush(self._free, (slot.number, id(slot), slot))

    def __del__(self) -> None:
        self.end()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lease: _Lease, num_inputs: int, parameters: Sequence[nn.Parameter], *given: Tensor
    ) -> Tensor:
        slot = lease.slot()
        _copy(slot.inputs, given[:num_inputs])
        slot.forward.replay()
        ctx.lease, ctx.num_inputs, ctx.parameters = lease, num_inputs, parameters
        (output,) = slot.outputs
        assert output is not None
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slot = ctx.lease.slot()
        _copy(slot.output_gradients, grads)
        slot.backward.replay()
        found = list(slot.gradients)
        # Cloned: the next micro batch overwrites it while it may still be used or sent.
        of_inputs = [None if g is None else g.clone() for g in found[: ctx.num_inputs]]
        of_parameters = [
            # Not cloned: a hook adds it to the main gradient at once.
            g.detach() if g is None or has_main_grad(parameter) else g.clone()
            for g, parameter in zip(found[ctx.num_inputs :], ctx.parameters, strict=True)
        ]  # fmt: skip
        ctx.lease.end()
        return None, None, None, *of_inputs, *of_parameters


def _alias(parameter: nn.Parameter) -> Tensor:
    """Return a parameter with the same memory and attributes."""
    alias = nn.Parameter(parameter.detach())
    vars(alias).update(vars(parameter))
    return alias


def _copy(static: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for target, value in zip(static, given, strict=True):
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)


class CapturedLayer:
    """Calls a layer by graphs if they compute the same, otherwise eagerly.

    Args:
        num_warm_ups: passes before each capture, at least one: libraries choose kernels and
            allocate memory in them.
    """

    def __init__(self, layer: nn.Module, num_warm_ups: int) -> None:
        self._layer, self._num_warm_ups = layer, max(1, num_warm_ups)
        self._modules = list(layer.modules())
        self._free: dict[object, list[tuple[int, int, _Slot]]] = {}
        self._num_slots: dict[object, int] = {}
        self._addresses: list[int] = []
        for part in self._modules:
            if isinstance(part, (ColumnParallelLinear, RowParallelLinear)):
                part.spec = replace(part.spec, fuses_main_grad=False)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return the outputs of the layer, (hidden states, context)."""
        leaves, spec = tree_flatten((arguments, options))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not self._is_capturable(leaves):
            return self._layer(*arguments, **options)
        self._wait_for_weights()
        parameters = {n: p for n, p in self._layer.named_parameters() if p.requires_grad}
        key = (
            spec,
            tuple(leaf is None for leaf in leaves),
            tuple((t.shape, t.dtype, t.requires_grad) for t in tensors),
            len(parameters),
        )
        free = self._free.setdefault(key, [])
        if free:
            slot = heapq.heappop(free)[2]
        else:
            number = self._num_slots.get(key, 0)
            self._num_slots[key] = number + 1
            slot = self._capture(number, leaves, spec, parameters)
        lease = _Lease(slot, free)
        weights = list(parameters.values())
        output = _Replay.apply(lease, len(tensors), weights, *tensors, *weights)
        return output, arguments[2] if len(arguments) > 2 else None

    def _is_capturable(self, leaves: Sequence[object]) -> bool:
        """Whether this call is a step of training that a replay repeats completely."""
        step = current_step()
        return (
            device.records_graphs()
            and self._layer.training
            and torch.is_grad_enabled()
            and step.yield_to_peer is None
            and step.cp_group is None  # this group may differ for the next micro batch
            and not (step.is_checkpointed or step.is_recomputing or step.defers_wgrads)
            and all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
            and not any(
                part._forward_hooks or part._backward_hooks or part._forward_pre_hooks_with_kwargs
                for part in self._modules
            )
            # Hooks of this package wait for weights, and do not read inputs.
            and all(
                hook.__module__.startswith(_OWN)
                for part in self._modules
                for hook in part._forward_pre_hooks.values()
            )
        )

    def _wait_for_weights(self) -> None:
        """Call the hooks that wait for gathered parameters, which a replay does not call.

        Raises:
            ScheduleError: the address of a weight has changed since the capture.
        """
        for part in self._modules:
            for hook in part._forward_pre_hooks.values():
                hook(part, ())
        addresses = [p.data_ptr() for p in self._layer.parameters()]
        if self._addresses and addresses != self._addresses:
            raise ScheduleError(
                f"the weights of {type(self._layer).__name__} have moved in memory.",
                rule="a captured layer reads its weights at the addresses of the capture",
                flags=["--cuda-graph-impl"],
                fix="write weights in place, or drop --cuda-graph-impl",
            )
        self._addresses = addresses

    def _capture(
        self,
        number: int,
        leaves: Sequence[object],
        spec: TreeSpec,
        parameters: Mapping[str, nn.Parameter],
    ) -> _Slot:
        """Record both passes for one more micro batch in flight.

        They read aliases of the weights. Autograd adds the gradient of a weight on the stream of
        the weight's first use, which is the default stream, and this stream refuses to wait for a
        capture. The first use of an alias is in the capture.
        """
        pool = MemoryPool()
        aliases: dict[str, Tensor] = {name: _alias(p) for name, p in parameters.items()}
        static = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        inputs = [leaf for leaf in static if isinstance(leaf, Tensor)]
        arguments, options = tree_unflatten(static, spec)
        differentiated = (*inputs, *aliases.values())
        wanted = [x for x in differentiated if x.requires_grad]
        live: list[Tensor] = []
        gradients_of_outputs: list[Tensor] = []

        def forward() -> Outputs:
            with torch.enable_grad():
                live[:] = [functional_call(self._layer, aliases, arguments, options)[0]]
            return tuple(live)

        def backward() -> Outputs:
            found = iter(torch.autograd.grad(live, wanted, gradients_of_outputs, allow_unused=True))
            return tuple(next(found) if x.requires_grad else None for x in differentiated)

        def both() -> None:
            forward()
            gradients_of_outputs[:] = [torch.zeros_like(live[0])]
            backward()

        device_graph.warm_up(both, self._num_warm_ups)
        first, second = device_graph.DeviceGraph(pool), device_graph.DeviceGraph(pool)
        outputs = first.capture(forward)
        gradients_of_outputs[:] = [torch.zeros_like(live[0])]
        gradients = second.capture(backward)
        return _Slot(number, first, second, inputs, outputs, gradients_of_outputs, gradients)
