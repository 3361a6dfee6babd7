"""A backend of NVIDIA Transformer Engine's classes.

Written against the library's documented interface; **it has not been run**, because the library
needs a GPU. The local backend is the reference: the two read and write the same checkpoints.

What differs from the local backend: attention dropout draws from the library's own generator, so
it depends on the layout; weight gradients are not accumulated inside the GEMM (its protocol for
`main_grad` is not ours).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.device import device_type
from megatron.core.foundation.errors import refuse_given
from megatron.core.foundation.optional_imports import require, why_missing
from megatron.core.fusions.fused_softmax import causal_mask
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.initialization import initialization_is_deferred
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    resolve_group,
    resolve_groups,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.topology.group import Group
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

HAVE_TE = why_missing("transformer_engine.pytorch") is None
"""Whether the library can be used. Without it every class below refuses to be built."""

_PURPOSE = "--transformer-impl transformer_engine"


class _Absent(nn.Module):
    """Stands for a class of the library where it is not installed."""

    def __init__(self, *_: object, **__: object) -> None:
        require("transformer_engine.pytorch", purpose=_PURPOSE)


if HAVE_TE:
    _te = require("transformer_engine.pytorch", purpose=_PURPOSE)
    _Linear, _LayerNormLinear = _te.Linear, _te.LayerNormLinear
    _DotProductAttention, _NORMS = (
        _te.DotProductAttention,
        {"LayerNorm": _te.LayerNorm, "RMSNorm": _te.RMSNorm},
    )
else:
    _Linear = _LayerNormLinear = _DotProductAttention = _Absent
    _NORMS = {"LayerNorm": _Absent, "RMSNorm": _Absent}


def _keep(weight: Tensor) -> Tensor:
    """Leave a weight unfilled: the model fills it by name."""
    return weight


def _linear_options(
    config: TransformerConfig, init_method: Callable[[Tensor], object], tp: Any, mode: str
) -> dict[str, Any]:
    """Return the arguments that all linear layers of the library share."""
    fills = config.perform_initialization and not initialization_is_deferred()
    return {
        "sequence_parallel": config.sequence_parallel,
        "fuse_wgrad_accumulation": False,
        "tp_group": tp,
        "tp_size": tp.size(),
        "get_rng_state_tracker": get_cuda_rng_tracker,
        "init_method": init_method if fills else _keep,
        "params_dtype": config.params_dtype,
        "parallel_mode": mode,
    }


def _describe(
    layer: nn.Module,
    init_method: Callable[[Tensor], object],
    *,
    split_dim: int,
    stride: int = 1,
    sequence_parallel: bool,
) -> None:
    """Attach the metadata that checkpoints, initialisation and reductions read."""
    partial = ("tp",) if sequence_parallel else ()
    for name, parameter in layer.named_parameters(recurse=False):
        if name == "weight":
            meta = ParamMeta(
                split_dim=split_dim, split_axis="tp", stride=stride, init_method=init_method
            )
        elif name == "bias" and split_dim == 0:
            meta = ParamMeta(split_dim=0, split_axis="tp", stride=stride)
        else:  # a replicated bias, or the parameters of a fused norm
            meta = ParamMeta(partial_grad_axes=partial)
        set_param_meta(parameter, meta)


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


class TEColumnParallelLinear(_Linear):  # type: ignore[misc,valid-type]
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
        options = _linear_options(config, init_method, tp, "column")
        super().__init__(input_size, output_size, bias=bias, return_bias=skip_bias_add, **options)
        self._returns_bias = skip_bias_add and bias
        _describe(self, init_method, split_dim=0, stride=stride, sequence_parallel=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ([s, b, o/tp] of x [s, b, i], bias [o/tp] to be added or None)."""
        out = super().forward(x)
        return out if self._returns_bias else (out[0] if isinstance(out, tuple) else out, None)


class TELayerNormColumnParallelLinear(_LayerNormLinear):  # type: ignore[misc,valid-type]
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
        super().__init__(
            input_size,
            output_size,
            eps=config.layernorm_epsilon,
            normalization=config.normalization,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            bias=bias,
            return_bias=skip_bias_add,
            **_linear_options(config, init_method, tp, "column"),
        )
        self._returns_bias = skip_bias_add and bias
        _describe(
            self,
            init_method,
            split_dim=0,
            stride=stride,
            sequence_parallel=config.sequence_parallel,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ([s, b, o/tp] of x [s, b, i], bias [o/tp] to be added or None)."""
        out = super().forward(x)
        return out if self._returns_bias else (out[0] if isinstance(out, tuple) else out, None)


class TERowParallelLinear(_Linear):  # type: ignore[misc,valid-type]
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
        options = _linear_options(config, init_method, tp, "row")
        super().__init__(input_size, output_size, bias=bias, return_bias=skip_bias_add, **options)
        self._returns_bias = skip_bias_add and bias
        _describe(self, init_method, split_dim=1, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ([s, b, o] of x [s, b, i/tp], bias [o] to be added or None)."""
        out = super().forward(x)
        return out if self._returns_bias else (out[0] if isinstance(out, tuple) else out, None)


class TENorm:
    """Factory: the library's LayerNorm or RMSNorm, as the config says."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> nn.Module:
        """Build the norm."""
        _refuse_norm(cls.__name__, config)
        norm = _NORMS[config.normalization](
            hidden_size,
            eps=eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            dtype=config.params_dtype,
        )
        for parameter in norm.parameters():
            axes = ("tp",) if config.sequence_parallel else ()
            set_param_meta(parameter, ParamMeta(partial_grad_axes=axes))
        return norm


class TEDotProductAttention(_DotProductAttention):  # type: ignore[misc,valid-type]
    """Attention kernels of the library; call and result of `DotProductAttention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options_of_others: object,
    ) -> None:
        _refuse("TEDotProductAttention", options_of_others)
        groups = resolve_groups(pg_collection)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        context = _context_parallel_options(groups, cp_comm_type)
        super().__init__(
            config.num_attention_heads,
            config.kv_channels,
            num_gqa_groups=config.num_query_groups,
            attention_dropout=dropout,
            qkv_format="sbhd",
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_of(layer_number),
            sequence_parallel=config.sequence_parallel,
            tp_group=groups.tp,
            tp_size=groups.tp.size(),
            get_rng_state_tracker=get_cuda_rng_tracker,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            **context,
        )
        self._cp_group = context.get("cp_group")
        self._attn_mask_type, self._window = attn_mask_type, config.window_of(layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend: [s, b, n/tp, d] -> [s, b, n/tp * d]; documents become a mask [b, 1, s, s].

        A mask hides keys besides those that the type and the window hide.
        """
        options: dict[str, Any] = {}
        if packed_seq_params is not None:
            _refuse("TEDotProductAttention over packed sequences", {"cp_group": self._cp_group})
            s, b = query.shape[:2]
            attention_mask = packed_seq_params.resolve(b, s, query.device).attention_mask
        if attention_mask is not None:
            kind = attn_mask_type or self._attn_mask_type
            options = {
                "attention_mask": whole_mask(
                    attention_mask, kind, self._window, query.shape[0], key.shape[0]
                ),
                "attn_mask_type": "arbitrary",
                "window_size": (-1, -1),
            }
        elif attn_mask_type is not None:
            options = {"attn_mask_type": attn_mask_type.name}
        if attention_bias is not None:
            options |= {
                "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": attention_bias,
            }
        return super().forward(query, key, value, **options)


def whole_mask(
    mask: Tensor,
    kind: AttnMaskType,
    window: tuple[int, int] | None,
    num_queries: int,
    num_keys: int,
) -> Tensor:
    """Return the mask with what type and window hide, for a kernel that reads the mask alone.

    Args:
        mask: bool, broadcastable to [b, 1, q, k], True where a key is hidden.
    """
    if "causal" in kind.name:
        return mask | causal_mask(num_queries, num_keys, window, mask.device)
    if window is None:
        return mask
    left, right = window
    distance = torch.arange(num_keys, device=mask.device) - torch.arange(
        num_keys - num_queries, num_keys, device=mask.device
    ).unsqueeze(1)
    outside = (distance < -left) & (left >= 0) | (distance > right) & (right >= 0)
    return mask | outside


def _context_parallel_options(groups: ProcessGroupCollection, kind: str | None) -> dict[str, Any]:
    """Return how the library's attention shares a sequence between ranks; {} for one rank."""
    if not isinstance(groups.cp, torch.distributed.ProcessGroup) or groups.cp.size() == 1:
        return {}
    return {
        "cp_group": list(groups.hcp) if kind == "a2a+p2p" else groups.cp,
        "cp_global_ranks": torch.distributed.get_process_group_ranks(groups.cp),
        "cp_stream": torch.get_device_module(device_type()).Stream(),
        "cp_comm_type": kind or "p2p",
    }


class TransformerEngineBackend:
    """The library's classes, as a `Backend`."""

    name = "transformer_engine"

    def __init__(self) -> None:
        require("transformer_engine.pytorch", purpose=_PURPOSE)

    def column_linear(self) -> Any:
        """Return the column-parallel linear layer."""
        return TEColumnParallelLinear

    def row_linear(self) -> Any:
        """Return the row-parallel linear layer."""
        return TERowParallelLinear

    def norm_column_linear(self) -> Any:
        """Return the norm fused with the linear layer after it."""
        return TELayerNormColumnParallelLinear

    def norm(self) -> Any:
        """Return the norm factory."""
        return TENorm

    def core_attention(self) -> Any:
        """Return the attention core."""
        return TEDotProductAttention
