"""How layers of Transformer Engine get the parameters, gradients and state of local ones.

Their weights have the metadata and first values of local weights; their gradients go where local
gradients go, at once or in the second half of a split backward pass; their state dictionaries have
the entries of local ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require
from megatron.core.parameters.initialization import full_weight, initialization_is_deferred
from megatron.core.parameters.param_meta import (
    ParamMeta,
    full_shape,
    has_main_grad,
    set_param_meta,
    shard_of,
)
from megatron.core.step_context import deferred_wgrad
from megatron.core.tensor_parallel.parallel_parameters import (
    ParallelLinear,
    tolerate_missing_extra_state,
)
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig

PURPOSE = "--transformer-impl transformer_engine"


def _leave(weight: Tensor) -> Tensor:
    """Leave a weight unfilled: every layout must begin with the same whole weight."""
    return weight


def checked(made: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, if the installed version of the library knows them all.

    Raises:
        ConfigError: it does not.
    """
    parameters = inspect.signature(made).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in options if name not in parameters]
    if unknown:
        version = getattr(require("transformer_engine", purpose=PURPOSE), "__version__", "?")
        raise ConfigError(
            f"{made.__name__} of Transformer Engine {version} has no argument "
            f"{', '.join(unknown)}.",
            rule="the layers here are written for version 2.0 and later",
            flags=["--transformer-impl"],
            fix='install a later version, or use --transformer-impl "local"',
        )
    return options


def layer_device(config: TransformerConfig) -> torch.device:
    return torch.device("cpu") if config.use_cpu_initialization else current_device()


def common_options(config: TransformerConfig) -> dict[str, Any]:
    """Return the arguments of every linear layer of the library."""
    return {
        "fuse_wgrad_accumulation": False,  # until there is a main gradient: see `prepare`
        "delay_wgrad_compute": True,  # can be deferred: `prepare` says whether it is
        "get_rng_state_tracker": None,  # it would draw weights, which have their values by name
        "init_method": _leave,
        "params_dtype": config.params_dtype,
        "device": layer_device(config),
    }


def linear_options(made: type, config: TransformerConfig, tp: Group, mode: str) -> dict[str, Any]:
    """Return the arguments of a linear layer that is split over ranks."""
    options = common_options(config) | {
        "sequence_parallel": config.sequence_parallel,
        "tp_group": tp,
        "tp_size": tp.size(),
        "parallel_mode": mode,
    }
    return checked(made, options)


@torch.no_grad()
def fill(
    weight: nn.Parameter, meta: ParamMeta, config: TransformerConfig, tp: Group
) -> nn.Parameter:
    """Attach metadata, and give the weight its part of the whole one's first values."""
    set_param_meta(weight, meta)
    draws = config.perform_initialization and not initialization_is_deferred()
    if meta.init_method is not None and draws:
        shape = full_shape(weight.shape, meta, tp.size())
        full = full_weight(shape, meta, meta.init_method, weight.device)
        weight.copy_(shard_of(full, meta, tp.rank(), tp.size()))
    return weight


def describe(
    layer: Any,
    init_method: Callable[[Tensor], object],
    config: TransformerConfig,
    tp: Group,
    *,
    split_dim: int,
    stride: int = 1,
    partial_axes: tuple[str, ...] = (),
) -> None:
    """Give parameters what local ones have: metadata and first values.

    Args:
        partial_axes: over which the gradients of replicated parameters are partial sums.
    """
    layer.config = config
    for name, parameter in layer.named_parameters(recurse=False):
        if name == "weight" or (name == "bias" and split_dim == 0):
            meta = ParamMeta(split_dim=split_dim, split_axis="tp", stride=stride)
            if name == "weight":
                meta = replace(meta, init_method=init_method)
        else:  # a replicated bias, or the parameters of a fused norm
            meta = ParamMeta(partial_grad_axes=partial_axes)
        fill(parameter, meta, config, tp)


def _zeroed_main_grad(weight: Any) -> Tensor:
    """Return the main gradient that the library's products are added to; zeros at first."""
    if weight.main_grad_is_fresh:
        weight.main_grad.zero_()
        weight.main_grad_is_fresh = False
    return weight.main_grad


def prepare(layer: Any, weights: Sequence[Any]) -> None:
    """Tell a layer of the library, before its forward, where weight gradients go, and when.

    They are added to the main gradients, where there are some. The library asks for those in
    backward if a weight says that it is sharded; only then is it known here whether the gradient of
    a step has begun.
    """
    fuses = layer.config.gradient_accumulation_fusion and all(map(has_main_grad, weights))
    layer.fuse_wgrad_accumulation = fuses
    # The gradient of a bias that the layer adds comes with the weight's; deferred, the library
    # keeps that of the first micro batch alone.
    can_wait = fuses and not (layer.use_bias and layer.apply_bias)
    layer.wgrad_store.enabled = can_wait and deferred_wgrad.wgrad_deferral_enabled()
    if fuses and not hasattr(weights[0], "__fsdp_param__"):
        for weight in weights:
            weight.__fsdp_param__ = True
            weight.get_main_grad = partial(_zeroed_main_grad, weight)


def hand_over(layer: Any, out: Tensor) -> Tensor:
    """Let the second half of a split backward pass compute what a layer has deferred."""
    if layer.wgrad_store.enabled and out.grad_fn is not None:

        def computed(*_: object) -> None:
            if not deferred_wgrad.defer_wgrad(layer.backward_dw):
                layer.backward_dw()

        out.grad_fn.register_hook(computed)
    return out


def apply_linear(
    layer: Any, forward: Callable[[Tensor], Any], x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Run a linear layer of the library: (output, bias to be added or None)."""
    prepare(layer, [layer.weight])
    out = forward(x)
    out, bias = out if isinstance(out, tuple) else (out, None)
    return hand_over(layer, out), bias if layer.returns_bias else None


class WithoutState(nn.Module):
    """A module whose state is its parameters, as that of local norms and experts.

    What the library would keep besides is about low precisions, and empty in others.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class WithEmptyState(nn.Module):
    """A linear layer whose state has the (empty) entry that local ones have."""

    get_extra_state = ParallelLinear.get_extra_state
    set_extra_state = ParallelLinear.set_extra_state

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_load_state_dict_pre_hook(tolerate_missing_extra_state)
