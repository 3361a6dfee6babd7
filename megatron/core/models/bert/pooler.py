"""Pool a sequence to one vector, computed from its first token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.transformer_config import TransformerConfig


class Pooler(MegatronModule):
    """tanh(x A^T + b) of the first token of the sequence (BERT, arXiv 1810.04805).

    Under context parallelism only rank 0 of `cp` has the first token. The output of other ranks is
    meaningless and must not be used in a loss.
    """

    def __init__(
        self,
        hidden_size: int,
        init_method: Callable[[Tensor], object],
        config: TransformerConfig,
        sequence_parallel: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.tp_group = resolve_groups(pg_collection).tp
        self.sequence_parallel = sequence_parallel
        self.dense = ReplicatedLinear(
            hidden_size,
            hidden_size,
            config=config,
            init_method=init_method,
            tp_group=self.tp_group,
            bias=True,
            sees_all_tokens=True,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pool [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism) to [b, h].

        Communication:
            under sequence parallelism one all-gather of one token of each rank of `tp`.
        """
        first = hidden_states[:1]
        if self.sequence_parallel:
            # Rank 0 has the first token: gather one token of each rank, not the whole sequence.
            first = gather_from_sequence_parallel_region(
                first.contiguous(), tensor_parallel_output_grad=False, group=self.tp_group
            )
        pooled, _ = self.dense(first[0])
        return torch.tanh(pooled)
