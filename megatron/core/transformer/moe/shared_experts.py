"""The expert that every token visits.

D. Dai et al., "DeepSeekMoE", section 3.2, arXiv 2401.06066. The gate is that of Qwen2-MoE.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """An MLP over all tokens, split over `tp` like that of a dense layer.

    Attributes:
        gate_weight: [1, h]; the output of a token counts by sigmoid(gate_weight @ token). None
            without a gate.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        gate: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            config,
            submodules,
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
            pg_collection=pg_collection,
        )
        self.gate_weight: nn.Parameter | None = None
        if gate or config.moe_shared_expert_gate:
            self.gate_weight = ReplicatedLinear(
                config.hidden_size,
                1,
                config=config,
                init_method=config.init_method,
                pg_collection=pg_collection,
            ).weight

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Compute the expert of [s, b, h] (under sequence parallelism [s/tp, b, h])."""
        output, bias = super().forward(hidden_states)
        if bias is not None:
            output = output + bias
        if self.gate_weight is not None:
            logits = F.linear(hidden_states, self.gate_weight)
            output = output * torch.sigmoid(logits.float()).to(output.dtype)
        return output, None
