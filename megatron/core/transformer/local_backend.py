"""The backend that needs nothing but torch."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class LocalBackend:
    """Plain torch: scaled_dot_product_attention, hence flash kernels on GPUs."""

    name = "local"

    def column_linear(self) -> Any:
        """Return the column-parallel linear layer."""
        return ColumnParallelLinear

    def row_linear(self) -> Any:
        """Return the row-parallel linear layer."""
        return RowParallelLinear

    def norm_column_linear(self) -> None:
        """Return None: the norm is a module of its own."""
        return None

    def norm(self) -> Any:
        """Return the norm factory."""
        return WrappedTorchNorm

    def core_attention(self) -> Any:
        """Return the attention core."""
        return DotProductAttention
