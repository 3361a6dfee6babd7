"""A linear layer that every tensor-parallel rank holds whole."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedLinear(ParallelLayer):
    """A linear layer without bias, whole on every tensor-parallel rank.

    Its gradient is the same on all of them, or, under sequence parallelism, a part each.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object] | None,
        tp_group: Group,
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        axes = ("tp",) if config.sequence_parallel else ()
        self.weight = self.new_parameter(
            output_size, input_size, init_method=init_method, split_dim=None, partial_grad_axes=axes
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s, b, input] -> ([s, b, output], no bias)."""
        return F.linear(x, self.weight), None
