"""A linear layer that every tensor-parallel rank holds whole."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedLinear(ParallelLayer):
    """A linear layer, whole on every tensor-parallel rank.

    Its gradient is the same on all of them, or, where they see different tokens, a part each.

    Args:
        sees_all_tokens: every rank of `tp_group` gets the same input; None: without sequence
            parallelism.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object] | None,
        tp_group: Group,
        bias: bool = False,
        sees_all_tokens: bool | None = None,
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        self.tensor_model_parallel = False  # clients ask the module how its weights are split
        if sees_all_tokens is None:
            sees_all_tokens = not config.sequence_parallel
        axes: tuple[str, ...] = () if sees_all_tokens else ("tp",)
        self.weight = self.new_parameter(
            output_size, input_size, init_method=init_method, split_dim=None, partial_grad_axes=axes
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = self.new_parameter(
                output_size, init_method=None, split_dim=None, partial_grad_axes=axes
            )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., input] -> ([..., output], no bias that is still to be added)."""
        return F.linear(x, self.weight, self.bias), None
