"""A backend of NVIDIA Transformer Engine's classes.

Linear layers and norms are the library's; attention is `DotProductAttention`, which tries the
library's kernel first. The local backend is the reference: both backends have the same parameters
with the same metadata and initial values, and read and write the same checkpoints. Weight gradients
are written where local layers write them, at once or in the second half of a split backward pass.

`make engine` compares the library's own Python with local layers on the CPU, with a substitute for
the compiled part. **Its kernels have not been run**, because they need a GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.foundation.optional_imports import require, why_missing
from megatron.core.kernels.attention import ASKED
from megatron.core.parameters.param_meta import ParamMeta, has_main_grad, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_group
from megatron.core.step_context import deferred_wgrad
from megatron.core.tensor_parallel.parallel_parameters import (
    ParallelLinear,
    device_of_parameters,
    fill_parameter,
    tolerate_missing_extra_state,
)
from megatron.core.topology.group import Group
from megatron.core.transformer.backend import Backend
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

PURPOSE = "--transformer-impl transformer_engine"
HAVE_TE = why_missing("transformer_engine.pytorch") is None
"""Whether the library can be used. Without it the constructor of every class below raises."""


class _Absent(nn.Module):
    """Replaces a class of the library when the library is not installed."""

    def __init__(self, *_: object, **__: object) -> None:
        require("transformer_engine.pytorch", purpose=PURPOSE)


if HAVE_TE:
    _te = require("transformer_engine.pytorch", purpose=PURPOSE)
    _Linear, _LayerNormLinear = _te.Linear, _te.LayerNormLinear
    _GroupedLinear = _te.GroupedLinear
    _NORMS = {"LayerNorm": _te.LayerNorm, "RMSNorm": _te.RMSNorm}
else:
    _Linear = _LayerNormLinear = _GroupedLinear = _Absent
    _NORMS = {"LayerNorm": _Absent, "RMSNorm": _Absent}


def _refuse(layer: str, given: Mapping[str, object]) -> None:
    """Raise `ConfigError` if an argument was given that this backend has no kernel for."""
    refuse_given(
        layer,
        given,
        rule="the layers of Transformer Engine have no kernel for it here",
        fix='use the local layers: --transformer-impl "local"',
    )


def _refuse_norm(layer: str, config: TransformerConfig) -> None:
    """Raise `ConfigError` if the library does not have the norm of the config."""
    norm = config.normalization
    _refuse(layer, {f"normalization={norm!r}": norm not in _NORMS})


def _checked(made: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options.

    Raises:
        ConfigError: the installed version of the library lacks one of them.
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


def _common_options(config: TransformerConfig) -> dict[str, Any]:
    """Return the arguments of every linear layer of the library."""
    return {
        "fuse_wgrad_accumulation": False,  # set by `_prepare` once there is a main gradient
        "delay_wgrad_compute": True,  # can be deferred: `_prepare` decides whether it is
        "get_rng_state_tracker": None,  # `fill_parameter` draws weights, by their names
        "init_method": lambda weight: weight,  # `fill_parameter` draws it, equal in every layout
        "params_dtype": config.params_dtype,
        "device": device_of_parameters(config),
    }


def _describe(
    layer: Any,
    init_method: Callable[[Tensor], object],
    config: TransformerConfig,
    tp: Group,
    split_dim: int,
    *,
    stride: int = 1,
    partial_axes: tuple[str, ...] = (),
) -> None:
    """Give the parameters of a layer the metadata and initial values of local ones.

    Args:
        partial_axes: axes over which the gradients of replicated parameters are partial sums.
    """
    layer.config = config
    for name, parameter in layer.named_parameters(recurse=False):
        if name == "weight" or (name == "bias" and split_dim == 0):
            meta = ParamMeta(split_dim=split_dim, split_axis="tp", stride=stride)
            if name == "weight":
                meta = replace(meta, init_method=init_method)
        else:  # a replicated bias, or the parameters of a fused norm
            meta = ParamMeta(partial_grad_axes=partial_axes)
        fill_parameter(parameter, meta, config, tp)


def _zeroed_main_grad(weight: Any) -> Tensor:
    """Return the main gradient, zeroed at its first use in a step."""
    if weight.main_grad_is_fresh:
        weight.main_grad.zero_()
        weight.main_grad_is_fresh = False
    return weight.main_grad


def _prepare(layer: Any, weights: Sequence[Any]) -> None:
    """Set, before the forward of a layer, where its weight gradients are written, and when.

    They are added to the main gradients if there are any. The library calls `get_main_grad` in
    backward if a weight is marked as sharded; only in backward is it known whether the main
    gradient of the step is still fresh.
    """
    fuses = layer.config.gradient_accumulation_fusion and all(map(has_main_grad, weights))
    layer.fuse_wgrad_accumulation = fuses
    # The library computes the gradient of the layer's bias together with the weight's; if both are
    # deferred, it keeps only the bias gradient of the first micro batch.
    can_wait = fuses and not (layer.use_bias and layer.apply_bias)
    layer.wgrad_store.enabled = can_wait and deferred_wgrad.wgrad_deferral_enabled()
    if fuses and not hasattr(weights[0], "__fsdp_param__"):
        for weight in weights:
            weight.__fsdp_param__ = True
            weight.get_main_grad = partial(_zeroed_main_grad, weight)


def _hand_over(layer: Any, out: Tensor) -> Tensor:
    """Let the second half of a split backward pass compute the deferred weight gradient."""
    if layer.wgrad_store.enabled and out.grad_fn is not None:

        def computed(*_: object) -> None:
            if not deferred_wgrad.defer_wgrad(layer.backward_dw):
                layer.backward_dw()

        out.grad_fn.register_hook(computed)
    return out


class WithoutState(nn.Module):
    """A module whose state is its parameters only, like local norms and experts.

    The library's extra state belongs to low precision, and is empty otherwise.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class WithEmptyState(nn.Module):
    """A linear layer whose state has the empty entry of local linear layers."""

    get_extra_state = ParallelLinear.get_extra_state
    set_extra_state = ParallelLinear.set_extra_state

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_load_state_dict_pre_hook(tolerate_missing_extra_state)


class _TEParallelLinear(WithEmptyState):
    """Constructor and call of the local parallel linear layers over a class of the library."""

    kind: ClassVar[type]
    """The library's class."""
    split_dim: ClassVar[int] = 0
    """Dimension of the weight that tensor-parallel ranks split: 0 the output, 1 the input."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool = True,
        skip_bias_add: bool = False,
        gather_output: bool = False,
        input_is_parallel: bool = True,
        is_expert: bool = False,
        stride: int = 1,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        tp_comm_buffer_name: str | None = None,
        **options_of_others: object,
    ) -> None:
        given = {
            "gather_output": gather_output,
            "input_is_parallel=False": not input_is_parallel,
            "is_expert": is_expert,
        }
        _refuse(type(self).__name__, given | options_of_others)
        tp = resolve_group(tp_group, "tp", pg_collection)
        self.returns_bias = skip_bias_add and bias
        options = _common_options(config) | {
            "sequence_parallel": config.sequence_parallel,
            "tp_group": tp,
            "tp_size": tp.size(),
            "parallel_mode": "row" if self.split_dim else "column",
        }
        super().__init__(
            input_size,
            output_size,
            bias=bias,
            return_bias=self.returns_bias,
            **self.norm_options(config),
            **_checked(self.kind, options),
        )
        axes = ("tp",) if config.sequence_parallel else ()
        _describe(self, init_method, config, tp, self.split_dim, stride=stride, partial_axes=axes)

    def norm_options(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the arguments of a fused norm."""
        return {}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the layer to x [s, b, i], or [s, b, i/tp] if the input is split.

        Returns:
            ([s, b, o/tp], or [s, b, o] if the input is split; bias that is still to be added).
        """
        _prepare(self, [self.weight])
        out = super().forward(x)
        out, bias = out if isinstance(out, tuple) else (out, None)
        return _hand_over(self, out), bias if self.returns_bias else None


class TEColumnParallelLinear(_TEParallelLinear, _Linear):  # type: ignore[misc,valid-type]
    """Linear layer split along its output; call and result of `ColumnParallelLinear`."""

    kind = _Linear


class TERowParallelLinear(_TEParallelLinear, _Linear):  # type: ignore[misc,valid-type]
    """Linear layer split along its input; call and result of `RowParallelLinear`."""

    kind, split_dim = _Linear, 1


class TELayerNormColumnParallelLinear(_TEParallelLinear, _LayerNormLinear):  # type: ignore[misc,valid-type]
    """The norm and the column-parallel linear layer after it, in one kernel."""

    kind = _LayerNormLinear

    def norm_options(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the arguments of the norm."""
        _refuse_norm(type(self).__name__, config)
        return {
            "eps": config.layernorm_epsilon,
            "normalization": config.normalization,
            "zero_centered_gamma": config.layernorm_zero_centered_gamma,
        }


class TEGroupedLinear(WithoutState, _GroupedLinear):  # type: ignore[misc,valid-type]
    """A linear map for each expert; call and parameters of `GroupedLinear`."""

    weights, biases = GroupedLinear.weights, GroupedLinear.biases

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
        shape = [output_size, input_size]
        shape[split_dim] = divide(shape[split_dim], expt_tp.size())
        options = _checked(_GroupedLinear, _common_options(config))
        # The dispatcher communicates: the library computes whole maps without biases.
        super().__init__(num_gemms, shape[1], shape[0], bias=False, **options)
        self.config, self.uses_bias, self.num_gemms = config, bias, num_gemms
        split = ParamMeta(split_dim=split_dim, split_axis="expt_tp", stride=stride, is_expert=True)
        for weight in self.weights():
            fill_parameter(weight, replace(split, init_method=init_method), config, expt_tp)
        # If the outputs are not split, the first rank alone adds the biases.
        axes = ("expt_tp",) if expt_tp.size() > 1 else ()
        whole = ParamMeta(partial_grad_axes=axes, is_expert=True)
        for index in range(num_gemms if bias else 0):
            added = nn.Parameter(self.weights()[0].new_zeros(shape[0]))
            self.register_parameter(
                f"bias{index}",
                fill_parameter(added, whole if split_dim else split, config, expt_tp),
            )

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Apply map i to its `tokens_per_expert[i]` rows of x [n, i]: [n, o]."""
        _prepare(self, self.weights())
        return _hand_over(self, super().forward(x, list(tokens_per_expert)))


@functools.cache
def _without_state(made: type) -> type:
    return type(made.__name__, (WithoutState, made), {})


class TENorm:
    """Factory: the library's LayerNorm or RMSNorm, by `config.normalization`."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> nn.Module:
        """Build the norm."""
        _refuse_norm(cls.__name__, config)
        made = _NORMS[config.normalization]
        options = {
            "sequence_parallel": config.sequence_parallel,
            "zero_centered_gamma": config.layernorm_zero_centered_gamma,
            "dtype": config.params_dtype,
            "device": device_of_parameters(config),
        }
        norm = _without_state(made)(hidden_size, eps=eps, **_checked(made, options))
        for parameter in norm.parameters():
            axes = ("tp",) if config.sequence_parallel else ()
            set_param_meta(parameter, ParamMeta(partial_grad_axes=axes))
        return norm


class TEDotProductAttention(DotProductAttention):
    """`DotProductAttention` that prefers the library's kernel if `attention_backend` is "auto".

    For calls that this kernel does not support (masks as matrices, sinks, keys received in parts)
    the next supporting kernel of the table is chosen.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.backend == "auto":
            self.backend = "fused"
            assert ASKED[self.backend][0] == "transformer-engine"


class TransformerEngineBackend(Backend):
    """The library's classes."""

    name = "transformer_engine"
    column_linear = TEColumnParallelLinear
    row_linear = TERowParallelLinear
    norm_column_linear = TELayerNormColumnParallelLinear
    grouped_linear = TEGroupedLinear
    norm = TENorm
    core_attention = TEDotProductAttention

    def __init__(self) -> None:
        require("transformer_engine.pytorch", purpose=PURPOSE)
