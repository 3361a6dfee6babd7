"""A backend of NVIDIA Transformer Engine's classes.

Its linear layers and norms are the library's; attention is `DotProductAttention`, which asks the
table of kernels for the library's kernel first. The local backend is the reference: the two have
the same parameters with the same metadata and initial values, and read and write the same
checkpoints.

The library's own Python has been run against local layers on the CPU (`make engine`, with a
stand-in for its compiled part); **its kernels have not been run**, because they need a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megatron.core.extensions.engine_parameters import (
    PURPOSE,
    WithEmptyState,
    WithoutState,
    apply_linear,
    checked,
    common_options,
    describe,
    fill,
    hand_over,
    layer_device,
    linear_options,
    prepare,
)
from megatron.core.foundation.errors import refuse_given
from megatron.core.foundation.optional_imports import require, why_missing
from megatron.core.kernels.attention import ASKED
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_group
from megatron.core.topology.group import Group
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

HAVE_TE = why_missing("transformer_engine.pytorch") is None
"""Whether the library can be used. Without it every class below refuses to be built."""


class _Absent(nn.Module):
    """Stands for a class of the library where it is not installed."""

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


class TEColumnParallelLinear(WithEmptyState, _Linear):  # type: ignore[misc,valid-type]
    """Linear layer split along its output; call and result of `ColumnParallelLinear`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        gather_output: bool = False,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        stride: int = 1,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        tp_comm_buffer_name: str | None = None,
        **options_of_others: object,
    ) -> None:
        given = {"gather_output": gather_output, "is_expert": is_expert} | options_of_others
        _refuse(type(self).__name__, given)
        tp = resolve_group(tp_group, "tp", pg_collection)
        self.returns_bias = skip_bias_add and bias
        options = linear_options(_Linear, config, tp, "column")
        super().__init__(
            input_size, output_size, bias=bias, return_bias=self.returns_bias, **options
        )
        describe(self, init_method, config, tp, split_dim=0, stride=stride)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ([s, b, o/tp] of x [s, b, i], bias [o/tp] to be added or None)."""
        return apply_linear(self, super().forward, x)


class TELayerNormColumnParallelLinear(WithEmptyState, _LayerNormLinear):  # type: ignore[misc,valid-type]
    """The norm and the column-parallel linear layer after it, in one kernel."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        gather_output: bool = False,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        stride: int = 1,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        tp_comm_buffer_name: str | None = None,
        **options_of_others: object,
    ) -> None:
        given = {"gather_output": gather_output, "is_expert": is_expert} | options_of_others
        _refuse(type(self).__name__, given)
        _refuse_norm(type(self).__name__, config)
        tp = resolve_group(tp_group, "tp", pg_collection)
        self.returns_bias = skip_bias_add and bias
        super().__init__(
            input_size,
            output_size,
            eps=config.layernorm_epsilon,
            normalization=config.normalization,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            bias=bias,
            return_bias=self.returns_bias,
            **linear_options(_LayerNormLinear, config, tp, "column"),
        )
        axes = ("tp",) if config.sequence_parallel else ()
        describe(self, init_method, config, tp, split_dim=0, stride=stride, partial_axes=axes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ([s, b, o/tp] of x [s, b, i], bias [o/tp] to be added or None)."""
        return apply_linear(self, super().forward, x)


class TERowParallelLinear(WithEmptyState, _Linear):  # type: ignore[misc,valid-type]
    """Linear layer split along its input; call and result of `RowParallelLinear`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        tp_comm_buffer_name: str | None = None,
        **options_of_others: object,
    ) -> None:
        scatters = {"input_is_parallel=False": not input_is_parallel}
        _refuse(type(self).__name__, scatters | {"is_expert": is_expert} | options_of_others)
        tp = resolve_group(tp_group, "tp", pg_collection)
        self.returns_bias = skip_bias_add and bias
        options = linear_options(_Linear, config, tp, "row")
        super().__init__(
            input_size, output_size, bias=bias, return_bias=self.returns_bias, **options
        )
        axes = ("tp",) if config.sequence_parallel else ()
        describe(self, init_method, config, tp, split_dim=1, partial_axes=axes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ([s, b, o] of x [s, b, i/tp], bias [o] to be added or None)."""
        return apply_linear(self, super().forward, x)


class TEGroupedLinear(WithoutState, _GroupedLinear):  # type: ignore[misc,valid-type]
    """A linear map for each expert; call and parameters of `GroupedLinear`."""

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
        options = checked(_GroupedLinear, common_options(config))
        # The dispatcher communicates: for the library these are whole maps, without biases.
        super().__init__(num_gemms, shape[1], shape[0], bias=False, **options)
        self.config, self.uses_bias, self.num_gemms = config, bias, num_gemms
        split = ParamMeta(split_dim=split_dim, split_axis="expt_tp", stride=stride, is_expert=True)
        for weight in self.weights():
            fill(weight, replace(split, init_method=init_method), config, expt_tp)
        # Biases of outputs that are whole are added on the first rank alone.
        axes = ("expt_tp",) if expt_tp.size() > 1 else ()
        whole = ParamMeta(partial_grad_axes=axes, is_expert=True)
        for index in range(num_gemms if bias else 0):
            added = nn.Parameter(self.weights()[0].new_zeros(shape[0]))
            self.register_parameter(
                f"bias{index}", fill(added, whole if split_dim else split, config, expt_tp)
            )

    def weights(self) -> list[nn.Parameter]:
        """Return the weights [o, i], expert by expert."""
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def biases(self) -> list[nn.Parameter]:
        """Return the biases [o], expert by expert; none without bias."""
        count = self.num_gemms if self.uses_bias else 0
        return [getattr(self, f"bias{index}") for index in range(count)]

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Apply map i to its `tokens_per_expert[i]` rows of x [n, i]: [n, o]."""
        prepare(self, self.weights())
        return hand_over(self, super().forward(x, list(tokens_per_expert)))


@functools.cache
def _without_state(made: type) -> type:
    return type(made.__name__, (WithoutState, made), {})


class TENorm:
    """Factory: the library's LayerNorm or RMSNorm, as the config says."""

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
            "device": layer_device(config),
        }
        norm = _without_state(made)(hidden_size, eps=eps, **checked(made, options))
        for parameter in norm.parameters():
            axes = ("tp",) if config.sequence_parallel else ()
            set_param_meta(parameter, ParamMeta(partial_grad_axes=axes))
        return norm


class TEDotProductAttention(DotProductAttention):
    """`DotProductAttention` that asks for the library's kernel where the config leaves the choice.

    What that kernel does not do (masks as matrices, sinks, keys that come in parts) is done by the
    next one of the table that does.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.backend == "auto":
            self.backend = "fused"
            assert ASKED[self.backend][0] == "transformer-engine"


class TransformerEngineBackend:
    """The library's classes, as a `Backend`."""

    name = "transformer_engine"

    def __init__(self) -> None:
        require("transformer_engine.pytorch", purpose=PURPOSE)

    def column_linear(self) -> Any:
        """Return the column-parallel linear layer."""
        return TEColumnParallelLinear

    def row_linear(self) -> Any:
        """Return the row-parallel linear layer."""
        return TERowParallelLinear

    def norm_column_linear(self) -> Any:
        """Return the norm fused with the linear layer after it."""
        return TELayerNormColumnParallelLinear

    def grouped_linear(self) -> Any:
        """Return the linear maps of experts."""
        return TEGroupedLinear

    def norm(self) -> Any:
        """Return the norm factory."""
        return TENorm

    def core_attention(self) -> Any:
        """Return the attention core."""
        return TEDotProductAttention
