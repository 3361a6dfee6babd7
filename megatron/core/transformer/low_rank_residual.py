"""A learned residual connection: a branch of low rank beside the mixer of a layer.

G. Menghani et al., "LAuReL: Learned Augmented Residual Layer", section 2 (the low-rank version),
arXiv 2411.07501, as in Gemma 3n. The branch reads the input of the mixer, after its norm. A layer
divides the sum of the residual stream, the mixer and the branch by the root of 2.

Legend: s local tokens of the sequence, b micro batch, h hidden, r rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class LowRankResidual(MegatronModule):
    """x + norm(B A x), with A [r, h] and B [h, r] replicated over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        sizes, tp = (config.hidden_size, config.laurel_rank), pg_collection.tp
        self.left = ReplicatedLinear(
            *sizes, config=config, init_method=config.init_method, tp_group=tp
        )
        self.right = ReplicatedLinear(
            *sizes[::-1], config=config, init_method=config.output_layer_init_method, tp_group=tp
        )
        self.norm: Any = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch for the input [s, b, h] of the mixer."""
        product, _ = self.right(self.left(x)[0])
        branch: Tensor = x + self.norm(product)
        return branch

    def added(self, total: Tensor, x: Tensor) -> Tensor:
        """Return (total + branch(x)) / sqrt(2), where total [s, b, h] is the residual stream with
        the output of the mixer."""
        return (total + self(x)) * 2**-0.5
