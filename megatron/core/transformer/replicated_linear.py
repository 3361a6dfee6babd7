"""A linear layer that is replicated over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedLinear(ParallelLayer):
    """A linear layer, replicated over tensor-parallel ranks.

    Its gradient is equal on all ranks if they process the same tokens, otherwise a partial sum.

    Args:
        sees_all_tokens: every rank of `tp_group` gets the same input; default True without
            sequence parallelism.
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
        self.tensor_model_parallel = False  # clients read this attribute of the module
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
        """Return ([..., output] of x [..., input], None); the bias is already added."""
        return F.linear(x, self.weight, self.bias), None


class LinearPart(ReplicatedLinear):
    """A matrix [h, h] in place of the mixer or of the MLP of a layer.

    Under sequence parallelism each tensor-parallel rank multiplies its own tokens, so nothing is
    communicated.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        layer_number: int | None = None,
    ) -> None:
        super().__init__(
            config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            tp_group=resolve_groups(pg_collection).tp,
            bias=config.add_bias_linear,
        )

    def forward(self, x: Tensor, **options: object) -> tuple[Tensor, None]:
        """Multiply [s, b, h]; the arguments of attention and of an MLP are not read."""
        return super().forward(x)
