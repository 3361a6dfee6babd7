"""A mixture-of-experts layer, which replaces an MLP: route, dispatch, compute, combine.

N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", arXiv 1701.06538. Experts of a latent width: V. Elango et al., "LatentMoE: Toward Optimal
Accuracy per FLOP and Parameter in Mixture of Experts", arXiv 2601.18089.

Legend: s sequence, b micro batch, h hidden, l latent width, t = s*b tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.kernels.row_counts import RowCounts, counts_on_device, group_of_row
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint, is_recomputing
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.dispatchers import build_dispatcher
from megatron.core.transformer.moe.load_balancing import DROPPED, TokenGroups
from megatron.core.transformer.moe.router import TopKRouter, expert_capacity
from megatron.core.transformer.moe.shared_experts import SharedExpertOverlap
from megatron.core.transformer.moe.token_dispatcher import (
    DispatchedTokens,
    ExchangeCapacity,
    TokenDispatcher,
)
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


@dataclass
class MoESubmodules:
    """Parts of a mixture-of-experts layer."""

    experts: ModuleSpec | type | Any = None
    shared_experts: ModuleSpec | type | Any = None
    router: ModuleSpec | type | Any = TopKRouter


class MoELayer(MegatronModule):
    """Router, dispatcher, experts of this rank, and the shared expert if there is one.

    Tensor-parallel ranks route different tokens: under sequence parallelism they hold different
    tokens, otherwise the layer splits the sequence over them and gathers the output.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        if not config.num_moe_experts or submodules is None:
            raise ConfigError(
                "a layer of experts in a model without experts.",
                rule="the spec of the layers fits the config",
                flags=["--spec", "--num-experts"],
                fix="use --num-experts 8, or a spec without experts",
            )
        self.pg_collection = groups = resolve_groups(pg_collection)
        self.layer_number = 0
        num_local_experts = divide(config.num_moe_experts, groups.ep.size())
        first = groups.ep.rank() * num_local_experts
        self.local_expert_indices = list(range(first, first + num_local_experts))
        self.router = build_module(
            submodules.router, config=config, pg_collection=groups, is_mtp_layer=is_mtp_layer
        )
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        if config.moe_latent_size:
            sizes = config.hidden_size, config.moe_latent_size
            self.fc1_latent_proj = self._projection(*sizes, config.init_method)
            self.fc2_latent_proj = self._projection(*sizes[::-1], config.output_layer_init_method)
        self.experts = build_module(
            submodules.experts, num_local_experts, config, pg_collection=groups
        )
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = build_module(
                submodules.shared_experts, config=config, pg_collection=groups
            )
        norm = WrappedTorchNorm if config.moe_branch_norms else IdentityOp
        self.input_norm, self.output_norm, self.shared_input_norm, self.shared_output_norm = (
            norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(4)
        )
        for parameter in self.input_norm.parameters():  # each rank norms the tokens that it sends
            meta = replace(get_param_meta(parameter), partial_grad_axes=("tp",))
            set_param_meta(parameter, meta)
        self.token_dispatcher: TokenDispatcher = build_dispatcher(
            config, num_local_experts, self.local_expert_indices, groups
        )
        # Without sequence parallelism the layer itself splits the tokens over the ranks.
        self._cut = SINGLE_RANK if config.sequence_parallel else groups.tp
        if layer_number is not None:
            self.set_layer_number(layer_number)

    def _projection(
        self, rows: int, columns: int, init_method: Callable[[Tensor], object] | None
    ) -> ReplicatedLinear:
        """Build a projection between tokens and latents, applied to the tokens of each rank."""
        tp = self.pg_collection.tp
        return ReplicatedLinear(
            rows,
            columns,
            config=self.config,
            init_method=init_method,
            tp_group=tp,
            bias=self.config.add_bias_linear,
            sees_all_tokens=tp.size() == 1,
        )

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer in the model (1-based), a key of random draws and logs."""
        self.layer_number = layer_number
        if hasattr(self.router, "set_layer_number"):
            self.router.set_layer_number(layer_number)

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: object = None,
        padding_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Compute the layer of [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).

        Args:
            intermediate_tensors: must be None: a layer is computed in one call.
            padding_mask: bool [b, s/cp], True for padding, where the output of the routed experts
                is zero.
            packed_seq_params: the documents of the whole sequences; statistics of a sequence are
                computed per document.
            token_ids: int64 [b, s/cp], read by the router of a hash layer.
        Returns:
            (output of the input's shape, None in the place of a bias that is still to be added).
        """
        given = {"intermediate_tensors": intermediate_tensors}
        refuse_given("MoELayer", given, rule="a layer is computed in one call", fix="leave it out")
        if self.config.moe_layer_recompute and self.training:
            return checkpoint(
                self._compute, False, hidden_states, padding_mask, packed_seq_params, token_ids
            ), None
        return self._compute(hidden_states, padding_mask, packed_seq_params, token_ids), None

    def _compute(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        token_ids: Tensor | None,
    ) -> Tensor:
        shared_overlap = None
        if self.shared_experts is not None and self.config.moe_shared_expert_overlap:
            shared_input = self.shared_input_norm(hidden_states)
            shared_overlap = SharedExpertOverlap(self.shared_experts, shared_input)
        with rng_state().in_scope("experts", self.layer_number):
            output = self._route_and_compute(
                hidden_states, padding_mask, packed_seq_params, token_ids, shared_overlap
            )
        output = self.output_norm(output)
        if shared_overlap is not None:
            assert shared_overlap.output is not None
            output = output + self.shared_output_norm(shared_overlap.output)
        elif self.shared_experts is not None:
            output = output + self._shared_output(hidden_states)
        if self.config.moe_average_shared_expert:
            output = output / 2
        return output

    def _shared_output(self, hidden_states: Tensor) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            assert self.shared_experts is not None
            output, _ = self.shared_experts(self.shared_input_norm(x))
            normed: Tensor = self.shared_output_norm(output)
            return normed

        if self.config.recomputes("shared_experts") and self.training:
            recomputed: Tensor = checkpoint(compute, False, hidden_states)
            return recomputed
        return compute(hidden_states)

    def _route_and_compute(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        token_ids: Tensor | None,
        shared_overlap: SharedExpertOverlap | None,
    ) -> Tensor:
        mask = None if padding_mask is None else padding_mask.t()  # [s/cp, b]
        whole = None
        if self.config.layout_invariant_mode:
            whole = self._route_all_tokens(hidden_states, mask, packed_seq_params)
        x, rows = hidden_states, hidden_states.shape[0]
        missing = -rows % self._cut.size()
        if missing:  # pad the sequence, so that it splits into equal parts
            x = F.pad(x, (0, 0, 0, 0, 0, missing))
            mask = x.new_zeros(rows, x.shape[1]).bool() if mask is None else mask
            mask = F.pad(mask, (0, 0, 0, missing), value=True)
        x = scatter_to_sequence_parallel_region(x, self._cut)
        if mask is not None:
            mask = _shard_of_rows(mask, self.pg_collection.tp)
        options: dict[str, Any] = {}
        if packed_seq_params is not None and self.config.counts_by_sequence:
            options["sequences"] = self._sequences(
                packed_seq_params, x, missing, self.pg_collection.tp
            )
        is_packed = bool(options)
        if token_ids is not None and self.layer_number <= self.config.moe_n_hash_layers:
            ids = F.pad(token_ids.t(), (0, 0, 0, missing))
            options["token_ids"] = _shard_of_rows(ids, self.pg_collection.tp)
        probs, routing_map = self.router(x, mask, **options) if whole is None else whole
        begin, end = (
            (None, None) if shared_overlap is None else (shared_overlap.begin, shared_overlap.end)
        )
        tokens = self.input_norm(x).reshape(-1, x.shape[-1])
        if self.fc1_latent_proj is not None:
            tokens, _ = self.fc1_latent_proj(tokens)  # [t, h] -> [t, l]
        chosen = None
        if mask is None and self.config.moe_expert_capacity_factor is None:
            chosen = tokens.shape[0] * self.config.moe_router_topk
        capacity = self._exchange_capacity(x, is_packed)
        sent = self.token_dispatcher.dispatch(tokens, probs, routing_map, begin, chosen, capacity)
        if sent.num_dropped is not None and not is_recomputing():
            self.router.load.add(DROPPED, sent.num_dropped)
        if self.config.moe_pad_expert_input_to_capacity:
            sent = pad_to_capacity(sent, self._max_tokens_per_expert(x, is_packed))
        tokens, probs = sent.tokens, sent.probs
        if self.config.moe_apply_probs_on_input:
            tokens = (tokens * probs.unsqueeze(-1)).to(tokens.dtype)
            probs = torch.ones_like(probs)
        output, _ = self.experts(tokens, sent.tokens_per_expert, probs)
        output = sent.combine(output, end)
        if self.fc2_latent_proj is not None:
            output, _ = self.fc2_latent_proj(output)
        output = output.view(x.shape)
        output = gather_from_sequence_parallel_region(output, False, self._cut)
        return output if output.shape[0] == rows else output[:rows]

    def _route_all_tokens(
        self, x: Tensor, mask: Tensor | None, packed: PackedSeqParams | None
    ) -> tuple[Tensor, Tensor]:
        """Route the tokens of all tensor-parallel ranks on each rank; see `TopKRouter`.

        Args:
            x: [s/cp, b, h]; [s/cp/tp, b, h] under sequence parallelism.
            mask: bool [s/cp, b], True for padding, or None.
        Returns:
            weights and map [t, e] of the tokens that this rank dispatches, padding included.
        """
        tp = self.pg_collection.tp
        splits = self.config.sequence_parallel
        x = gather_from_sequence_parallel_region(x, False, tp if splits else SINGLE_RANK)
        sequences = None
        if packed is not None and self.config.counts_by_sequence:
            sequences = self._sequences(packed, x, 0, SINGLE_RANK)
        routed = self.router(x, mask, sequences)
        missing = -x.shape[0] % tp.size()
        probs, routing_map = (
            F.pad(part.view(*x.shape[:2], -1), (0, 0, 0, 0, 0, missing)) for part in routed
        )
        probs = scatter_to_sequence_parallel_region(probs, tp)
        return probs.flatten(0, 1), _shard_of_rows(routing_map, tp).flatten(0, 1)

    def _sequences(
        self, packed: PackedSeqParams, x: Tensor, num_padded: int, tp: Group
    ) -> TokenGroups:
        """Return the documents of the tokens x [s, b, h] that this rank routes.

        Args:
            num_padded: padding positions after the tokens of all ranks of `tp`.
            tp: ranks that route different tokens.
        """
        cp = self.pg_collection.microbatch_cp
        length = x.shape[0] * tp.size() - num_padded
        documents = packed.resolve(x.shape[1], length * cp.size(), x.device)
        numbers, count = documents.numbered
        own = sequence_shard_of_rank(length, cp=cp, sp=SINGLE_RANK).positions(x.device)
        rows = own[torch.arange(length + num_padded, device=x.device).clamp(max=length - 1)]
        return TokenGroups(_shard_of_rows(numbers[:, rows].t(), tp), count)

    def _exchange_capacity(self, x: Tensor, is_packed: bool) -> ExchangeCapacity | None:
        """Return the sizes of the exchange of [s, b, h] if the config fixes them, else None."""
        config, ranks = self.config, self.pg_collection.ep.size()
        num_tokens = x.shape[0] * x.shape[1]
        choices = num_tokens * config.moe_router_topk
        if config.moe_expert_rank_capacity_factor is not None:
            even = choices / ranks
            rows = -int(-even * config.moe_expert_rank_capacity_factor // 1)
            # Each token is sent to a rank once for each of the rank's experts that it chooses.
            local = min(config.moe_router_topk, len(self.local_expert_indices))
            return ExchangeCapacity(min(rows, num_tokens * local), choices)
        if config.moe_pad_expert_input_to_capacity:
            capacity = x.shape[1] * self._capacity(x, is_packed)
            return ExchangeCapacity(
                min(num_tokens, capacity) * len(self.local_expert_indices), choices
            )
        return None

    def _capacity(self, x: Tensor, is_packed: bool) -> int:
        """Return the most tokens that an expert takes of a whole sample.

        Each packed sequence has a capacity of its own, rounded up; the bound of their sum is the
        number of tokens.
        """
        length = x.shape[0] * self.pg_collection.tp.size() * self.pg_collection.cp.size()
        return length if is_packed else expert_capacity(self.config, length)

    def _max_tokens_per_expert(self, x: Tensor, is_packed: bool) -> int:
        """Return the most rows that an expert receives: its capacity in each of the samples."""
        groups = self.pg_collection
        capacity = self._capacity(x, is_packed)
        senders = groups.tp_ep.size()
        of_my_sequences = set(groups.ranks.get("tp_ep", [0])) & set(groups.ranks.get("tp_cp", [0]))
        return x.shape[1] * capacity * (senders // max(len(of_my_sequences), 1))


def _shard_of_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part of x [s, b] along s."""
    length = x.shape[0] // group.size()
    return x.narrow(0, group.rank() * length, length)


def pad_to_capacity(sent: DispatchedTokens, capacity: int) -> DispatchedTokens:
    """Pad the rows of every expert with zeros to `capacity`, so that shapes do not change.

    Args:
        capacity: at least the most rows that an expert can receive.
    """
    counts = counts_on_device(sent.tokens_per_expert, sent.tokens.device)
    num_experts, num_rows = len(sent.tokens_per_expert), sent.tokens.shape[0]
    group = group_of_row(counts, num_rows)
    begins = torch.arange(num_experts, device=counts.device) * capacity
    shift = begins - (counts.cumsum(0) - counts)
    total = num_experts * capacity
    position = F.pad(shift, (0, 1))[group] + torch.arange(num_rows, device=counts.device)
    # Padding rows are written to one extra slot at the end, which is dropped.
    spare = int(isinstance(sent.tokens_per_expert, RowCounts))
    position = torch.where(group < num_experts, position, total) if spare else position

    def in_slots(rows: Tensor) -> Tensor:
        empty = rows.new_zeros((total + spare, *rows.shape[1:]))
        return empty.index_copy(0, position, rows)[:total]

    return DispatchedTokens(
        in_slots(sent.tokens),
        in_slots(sent.probs),
        [capacity] * num_experts,
        lambda output, overlap_fn=None: sent.combine(
            F.pad(output, (0, 0, 0, spare)).index_select(0, position), overlap_fn
        ),
        sent.num_dropped,
    )
