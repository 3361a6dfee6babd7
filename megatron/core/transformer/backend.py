"""What a backend offers: the classes that a layer's heavy parts are built from.

Specs are written against this Protocol. The local backend is plain torch; a backend of
`megatron.core.extensions` wraps a GPU library. A backend returns classes (or specs), it builds
nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from megatron.core.transformer.torch_norm import NormColumnParallelLinear, WrappedTorchNorm


class Backend(Protocol):
    """Classes of one implementation. Signatures are those of the local classes."""

    name: str
    """"local", "transformer_engine", ..."""

    def column_linear(self) -> Any:
        """Linear layer split along its output: `ColumnParallelLinear`."""

    def row_linear(self) -> Any:
        """Linear layer split along its input: `RowParallelLinear`."""

    def norm_column_linear(self) -> Any | None:
        """Norm fused with the column-parallel linear after it; None where there is none.

        With it, `input_layernorm` and `pre_mlp_layernorm` of a layer are left empty and their
        parameters are called `linear_qkv.layer_norm_weight`, `linear_fc1.layer_norm_weight`.
        """

    def grouped_linear(self) -> Any:
        """Linear map of each expert, all in one product: `GroupedLinear`."""

    def norm(self) -> Any:
        """LayerNorm or RMSNorm, as the config says."""

    def core_attention(self) -> Any:
        """Softmax attention: `DotProductAttention`."""


class LocalBackend:
    """The classes of this package; kernels are chosen from the tables of `core.kernels`."""

    name = "local"

    def column_linear(self) -> Any:
        """Return the column-parallel linear layer."""
        return ColumnParallelLinear

    def row_linear(self) -> Any:
        """Return the row-parallel linear layer."""
        return RowParallelLinear

    def norm_column_linear(self) -> Any | None:
        """Return None: the norm is a module of its own."""
        return None

    def grouped_linear(self) -> Any:
        """Return the linear maps of experts."""
        return GroupedLinear

    def norm(self) -> Any:
        """Return the norm factory."""
        return WrappedTorchNorm

    def core_attention(self) -> Any:
        """Return the attention core."""
        return DotProductAttention


class TELayerNormColumnParallelLinear(NormColumnParallelLinear):
    """`NormColumnParallelLinear`, under the name that tells clients how its parameters are split.

    megatron-bridge knows by the name of the class that `layer_norm_weight` is whole on all ranks.
    """


class LocalFusedBackend(LocalBackend):
    """The local classes under the parameter names of backends that fuse norms into linear layers.

    For code that asks for such a backend, and maps parameters by its names, where its library is
    not installed or has no such layer.
    """

    name = "local_fused"

    def norm_column_linear(self) -> Any:
        """Return the norm and the linear layer after it, as one module."""
        return TELayerNormColumnParallelLinear
