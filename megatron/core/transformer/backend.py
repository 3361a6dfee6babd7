"""Backends: the classes that the heavy parts of a layer are built from.

Specs are written against `Backend`. The local backend is plain torch; a backend of
`megatron.core.extensions` wraps a GPU library.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from megatron.core.transformer.torch_norm import NormColumnParallelLinear, WrappedTorchNorm


class Backend:
    """Classes (or specs) of one implementation, with the signatures of the local classes."""

    name: str
    """"local", "transformer_engine", ..."""
    column_linear: Any
    """Linear layer split along its output: `ColumnParallelLinear`."""
    row_linear: Any
    """Linear layer split along its input: `RowParallelLinear`."""
    norm_column_linear: Any = None
    """Norm fused with the column-parallel linear layer after it; None if the backend has none.

    With it, `input_layernorm` and `pre_mlp_layernorm` of a layer are left empty and their
    parameters are called `linear_qkv.layer_norm_weight`, `linear_fc1.layer_norm_weight`.
    """
    grouped_linear: Any
    """Linear maps of all experts, computed in one grouped product: `GroupedLinear`."""
    norm: Any
    """LayerNorm or RMSNorm, by `config.normalization`."""
    core_attention: Any
    """Softmax attention: `DotProductAttention`."""


class LocalBackend(Backend):
    """The classes of this package; kernels are chosen from the tables of `core.kernels`."""

    name = "local"
    column_linear = ColumnParallelLinear
    row_linear = RowParallelLinear
    grouped_linear = GroupedLinear
    norm = WrappedTorchNorm
    core_attention = DotProductAttention


class TELayerNormColumnParallelLinear(NormColumnParallelLinear):
    """`NormColumnParallelLinear` under Transformer Engine's name.

    megatron-bridge tests the class name to find out that `layer_norm_weight` is replicated over
    tensor-parallel ranks.
    """


class LocalFusedBackend(LocalBackend):
    """The local classes under the parameter names of backends that fuse norms into linear layers.

    For code that requests such a backend and maps parameters by its names, when its library is not
    installed or lacks such a layer.
    """

    name = "local_fused"
    norm_column_linear = TELayerNormColumnParallelLinear
