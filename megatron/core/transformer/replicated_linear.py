"""A linear layer that is replicated over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.linear_with_overlap import LinearCommSpec, parallel_linear
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.tensor_parallel.unit_products import Units
from megatron.core.topology.group import SINGLE_RANK, Group
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
        self.rows_group = SINGLE_RANK if sees_all_tokens else tp_group
        is_whole = sees_all_tokens or config.layout_invariant_mode
        axes: tuple[str, ...] = () if is_whole else ("tp",)
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
        if self.config.layout_invariant_mode:
            runs = self.config.sequence_units_of_rank
            return linear_of_all_rows(x, self.weight, self.bias, self.rows_group, runs), None
        return F.linear(x, self.weight, self.bias), None


def linear_of_all_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, runs: int
) -> Tensor:
    """Multiply the rows of all ranks on each rank, so that the product has one shape in every
    layout (`layout_invariant_mode`); the gradients of weight and bias are whole on each rank.

    Args:
        x: [s/tp, b, i], the rows of this rank.
        weight: [o, i], bias: [o], equal on all ranks.
        group: the ranks that split the rows.
        runs: units of the sequence in the rows of all ranks; each is a product of its own.
    Returns:
        [s/tp, b, o], the rows of this rank.
    Communication:
        an all-gather of the rows [s, b, i], in backward one of their gradients [s, b, o].
    """
    x = mappings.gather_from_sequence_parallel_region(x, False, group)
    spec = LinearCommSpec(SINGLE_RANK, units=Units(0, 1, runs=runs))
    out = parallel_linear(x, weight, bias, spec)
    return mappings.scatter_to_sequence_parallel_region(out, group)


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
