"""The expert that every token uses.

D. Dai et al., "DeepSeekMoE", section 3.2, arXiv 2401.06066. Qwen2-MoE has the same gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.dot_product_attention import gated
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.replicated_linear import ReplicatedLinear, linear_of_all_rows
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """An MLP over all tokens, split over `tp` like the MLP of a dense layer.

    Attributes:
        gate_weight: [1, h] or None; the output of a token is multiplied by
            sigmoid(gate_weight @ token).
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
                tp_group=self.pg_collection.tp,
            ).weight

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Compute the expert of [s, b, h] (under sequence parallelism [s/tp, b, h])."""
        return self.fc2_and_gate(self.fc1_and_act(hidden_states), hidden_states), None

    def fc2_and_gate(self, intermediate: Tensor, hidden_states: Tensor) -> Tensor:
        """Compute the output [s, b, h] from the result of `fc1_and_act` and the input."""
        output, bias = self.linear_fc2(intermediate)
        if bias is not None:
            output = output + bias
        if self.gate_weight is not None and self.config.layout_invariant_mode:
            cut = self.pg_collection.tp if self.config.sequence_parallel else SINGLE_RANK
            runs = self.config.sequence_units_of_rank
            logits = linear_of_all_rows(hidden_states, self.gate_weight, None, cut, runs)
            output = gated(output, logits, in_vectors=True)
        elif self.gate_weight is not None:
            logits = F.linear(hidden_states, self.gate_weight)
            output = output * torch.sigmoid(logits.float()).to(output.dtype)
        return output


class SharedExpertOverlap:
    """The shared expert of one forward pass, computed during the exchange of the routed experts.

    `begin` runs fc1 during the dispatch, `end` runs fc2 during the combine; backward overlaps the
    same way ("DeepSeek-V3 Technical Report", section 3.2.1, arXiv 2412.19437, also overlaps the
    exchange with other work).

    Attributes:
        output: output of the expert, set by `end`.
    """

    def __init__(self, expert: SharedExpertMLP, hidden_states: Tensor) -> None:
        self._expert, self._hidden_states = expert, hidden_states
        self._intermediate: Tensor | None = None
        self.output: Tensor | None = None

    def begin(self) -> None:
        """Compute the first half."""
        self._intermediate = self._expert.fc1_and_act(self._hidden_states)

    def end(self) -> None:
        """Compute the second half."""
        assert self._intermediate is not None
        self.output = self._expert.fc2_and_gate(self._intermediate, self._hidden_states)
        self._intermediate = None
