"""The experts of one rank: modules one after the other, or all in grouped products.

Both forms have the same weights, initial values and checkpoint, so a run may change between them.

Legend: n rows, ordered by expert; h hidden size (or latent size), f width of an expert; l local
experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import RankOffset, ShardedStateDict
from megatron.core.kernels.grouped_products import fill_tiles
from megatron.core.kernels.row_counts import join_rows, split_rows
from megatron.core.offload.saved_activations import offloading
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP, MLPSubmodules, gated
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.grouped_linear import GroupedLinear, rows_with_bias
from megatron.core.transformer.sharded_state import declare_tensor
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


class _Experts(MegatronModule):
    """Names and checkpoints of the experts, for both forms."""

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        self.num_local_experts = num_local_experts
        self.input_size = config.moe_latent_size or config.hidden_size
        self.first_expert = self.pg_collection.ep.rank() * num_local_experts
        self.names_in_model: dict[str, str] = {}
        """Name of each parameter -> its name in the one-device model: numbered by expert."""

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the second layer's bias: one of the ranks that share an expert, or
        all of them if their outputs are whole (layout-invariant mode)."""
        return self.config.layout_invariant_mode or self.pg_collection.expt_tp.rank() == 0

    def expert_and_kind(self, name: str) -> tuple[int, str]:
        """Split a parameter's name into the expert's local number and the name inside it."""
        raise NotImplementedError

    def number_experts(self) -> None:
        """Set `names_in_model`; call it again after adding parameters."""
        for name, _ in self.named_parameters():
            index, kind = self.expert_and_kind(name)
            self.names_in_model[name] = f"local_experts.{self.first_expert + index}.{kind}"

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Declare the experts as slices of stacks: an axis of all experts before the weight's own.

        Keys are `experts.linear_fc1.weight` and so on, for both forms.
        """
        total = self.num_local_experts * self.pg_collection.ep.size()
        declared: ShardedStateDict = {}
        for name, parameter in (*self.named_parameters(), *self.named_buffers()):
            index, kind = self.expert_and_kind(name)
            position = (len(sharded_offsets), self.first_expert + index, total)
            declared[prefix + name] = declare_tensor(
                f"{prefix}experts.{kind}",
                parameter,
                self.pg_collection,
                (*sharded_offsets, position),
                metadata,
            )
        return declared


class SequentialMLP(_Experts):
    """An `MLP` per expert."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_local_experts, config, resolve_groups(pg_collection))
        self.local_experts = nn.ModuleList(
            MLP(
                config,
                submodules,
                is_expert=True,
                input_size=self.input_size,
                ffn_hidden_size=config.moe_ffn_hidden_size,
                pg_collection=self.pg_collection,
            )
            for _ in range(num_local_experts)
        )
        self.number_experts()

    def expert_and_kind(self, name: str) -> tuple[int, str]:
        """Split local_experts.3.linear_fc1.weight to (3, linear_fc1.weight)."""
        _, index, kind = name.split(".", 2)
        return int(index), kind

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Sequence[int],
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Apply the experts to rows [n, h] with weights [n]: (weighted outputs [n, h], no bias).

        An expert without rows is called too, so that its gradient exists in every step. In
        layout-invariant mode there is a number of rows for each expert and unit of a micro batch.
        """
        outputs = []
        repeats = len(tokens_per_expert) // self.num_local_experts
        for expert, rows, probs in zip(
            [expert for expert in self.local_experts for _ in range(repeats)],
            split_rows(permuted_local_hidden_states, tokens_per_expert),
            split_rows(permuted_probs, tokens_per_expert),
            strict=True,
        ):
            filled = fill_tiles(rows)
            shares = probs if filled is rows else F.pad(probs, (0, len(filled) - len(rows)))
            output, bias = expert(filled, shares)
            if bias is not None:
                if not self.adds_bias:
                    shares = shares * 0
                output = output + (bias * shares[:, None]).to(output.dtype)
            outputs.append(output[: len(rows)])
        return join_rows(outputs, permuted_local_hidden_states.shape[0]), None


class GroupedMLP(_Experts):
    """All experts in two grouped products.

    Args:
        submodules: classes with the call of `GroupedLinear`, the default.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(num_local_experts, config, resolve_groups(pg_collection))
        assert config.moe_ffn_hidden_size and config.init_method
        assert config.output_layer_init_method
        if submodules is None:
            submodules = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        blocks = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            num_local_experts,
            self.input_size,
            config.moe_ffn_hidden_size * blocks,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear,
            split_dim=0,
            stride=blocks,
            expt_tp=self.pg_collection.expt_tp,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            num_local_experts,
            config.moe_ffn_hidden_size,
            self.input_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            split_dim=1,
            expt_tp=self.pg_collection.expt_tp,
        )
        self.number_experts()

    def expert_and_kind(self, name: str) -> tuple[int, str]:
        """Split linear_fc1.weight3 to (3, linear_fc1.weight)."""
        found = re.fullmatch(r"(.*?)(\d+)", name)
        assert found, name
        return int(found[2]), found[1]

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Sequence[int],
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Apply the experts to rows [n, h] with weights [n]: (weighted outputs [n, h], no bias)."""
        counts, probs = tokens_per_expert, permuted_probs
        is_exact = self.config.layout_invariant_mode
        with offloading(self.config.offloads("expert_fc1"), self.linear_fc1):
            x = self.linear_fc1(permuted_local_hidden_states, counts)
        if self.linear_fc1.uses_bias:
            x = rows_with_bias(x, counts, self.linear_fc1.biases(), is_exact=is_exact)
        dropped = CheckpointWithoutOutput()
        if self.config.recomputes("moe_act") and self.training:
            x = dropped.checkpoint(self._activate, x, probs)
        else:
            with offloading(self.config.offloads("moe_act")):
                x = self._activate(x, probs)
        x = self.linear_fc2(x, counts)
        dropped.discard_output_and_register_recompute(x)
        if self.linear_fc2.uses_bias:
            share = probs if self.adds_bias else probs * 0
            x = rows_with_bias(x, counts, self.linear_fc2.biases(), share, is_exact=is_exact)
        return x, None

    def _activate(self, x: Tensor, probs: Tensor) -> Tensor:
        """Return the input of the second layer: rows [n, f], each times its weight [n]."""
        # f is smaller than h, and the output of the second layer need not be saved for backward.
        config, tp = self.config, self.pg_collection.expt_tp
        return gated(x, config.activation_func, config, weights=probs, is_expert=True, expt_tp=tp)
