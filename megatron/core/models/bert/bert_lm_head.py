"""The transformation of hidden states before BERT's output layer."""

from __future__ import annotations

from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class BertLMHead(MegatronModule):
    """norm(act(x A^T + b)), on each rank's tokens; the output layer follows.

    J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", arXiv 1810.04805, as
    in the authors' code. Activation and norm are the same as in the layers.
    """

    def __init__(
        self,
        hidden_size: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.dense = ReplicatedLinear(
            hidden_size,
            hidden_size,
            config=config,
            init_method=config.init_method,
            tp_group=resolve_groups(pg_collection).tp,
            bias=True,
        )
        self.layer_norm = WrappedTorchNorm(config, hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Transform [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism); same shape."""
        hidden_states, _ = self.dense(hidden_states)
        return self.layer_norm(self.config.activation_func(hidden_states))
