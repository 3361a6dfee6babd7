"""The router of a mixture-of-experts layer, which chooses the experts of each token.

Legend: s sequence, b micro batch, h hidden, e experts; t = s*b tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parameters.keyed_draws import keyed_uniform
from megatron.core.parameters.param_meta import in_rows
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.step_context.context import attach_aux_loss
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.tensor_parallel.random import is_recomputing
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.moe.load_balancing import (
    ExpertLoad,
    LoadTrackingRouter,
    TokenGroups,
    load_balancing_loss,
    z_loss,
)
from megatron.core.transformer.moe.router_replay import (
    RouterReplay,
    routing_groups,
    rows_of_rank,
)
from megatron.core.transformer.moe.routing import (
    RoutingResult,
    apply_capacity,
    sinkhorn,
    sinkhorn_routing,
    topk_routing,
)
from megatron.core.transformer.replicated_linear import linear_of_all_rows
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import collectives

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(LoadTrackingRouter, ParallelLayer):
    """Scores every expert for every token and chooses k of them.

    The ranks of tp x cp share the sequences of a micro batch and route different tokens, also
    without sequence parallelism: the weight's gradient is partial over `tp`.

    Attributes:
        weight: [e, h]; bias: [e], or None in models without biases.
        scale: [h], per_expert_scale: [e], of `moe_router_scales`, or None.
        expert_bias: [e] fp32, added to the scores for the choice, or None.
        router_replay: records or replays the choices.
        global_shares: [e] fp32, each expert's share of the last step's assignments; None without a
            balance loss over the global batch.
        token_experts: int64 [v, k], the experts of each token id in a hash layer, else None.
    """

    expert_bias: Tensor | None
    global_shares: Tensor | None
    token_experts: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        groups = resolve_groups(pg_collection)
        super().__init__(config, tp_group=groups.tp)
        assert config.num_moe_experts
        self.config: TransformerConfig = config
        self.pg_collection, self.routing_groups = groups, routing_groups(config, groups)
        self.routes_tokens_of_all_tp_ranks = config.layout_invariant_mode
        self.is_mtp_layer = is_mtp_layer
        self.num_experts = config.num_moe_experts
        self.topk = config.moe_router_topk
        self.load = ExpertLoad(self.num_experts, 0)
        self.router_replay = RouterReplay()
        is_partial = config.tensor_model_parallel_size > 1 and not config.layout_invariant_mode
        axes = ("tp",) if is_partial else ()
        self.weight = self.new_parameter(
            self.num_experts,
            config.hidden_size,
            init_method=config.init_method,
            split_dim=None,
            partial_grad_axes=axes,
        )
        self.bias: nn.Parameter | None = None
        if config.add_bias_linear:
            self.bias = self.new_parameter(
                self.num_experts, init_method=None, split_dim=None, partial_grad_axes=axes
            )
        self.scale, self.per_expert_scale = (
            self.new_parameter(
                size, init_method=nn.init.ones_, split_dim=None, partial_grad_axes=axes
            )
            if config.moe_router_scales
            else None
            for size in (config.hidden_size, self.num_experts)
        )
        even = torch.full((self.num_experts,), 1.0 / self.num_experts, device=self.weight.device)
        uses_bias = config.moe_router_enable_expert_bias
        uses_shares = "global_aux_loss" in config.balance_losses()
        self.register_buffer("expert_bias", torch.zeros_like(even) if uses_bias else None)
        self.register_buffer("global_shares", even if uses_shares else None)
        self.register_buffer("token_experts", None)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer in the model, for logs; a hash layer gets its table."""
        self.load.layer_number = layer_number
        if layer_number > self.config.moe_n_hash_layers:
            return
        generator = torch.Generator().manual_seed(layer_number)
        num_tokens = self.config.unpadded_vocab_size
        assert num_tokens, "a hash layer has a row for each token id: set unpadded_vocab_size"
        drawn = torch.rand(num_tokens, self.num_experts, generator=generator)
        self.token_experts = drawn.topk(self.topk).indices.to(self.weight.device)
        self.expert_bias = None

    def forward(
        self,
        input: Tensor,
        padding_mask: Tensor | None = None,
        sequences: TokenGroups | None = None,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts for the tokens [s, b, h] of this rank.

        Args:
            padding_mask: bool [s, b], True for padding, which is routed to no expert and excluded
                from all losses.
            sequences: the sequence of each token, if several are packed into a sample; otherwise a
                sample is one sequence.
            token_ids: int64 [s, b], read in hash layers.
        Returns:
            (weights [t, e], zero where an expert is not chosen; routing map, bool [t, e]).
        Communication:
            with balance losses, sums of e counts for each sequence over the ranks that share the
            micro batch; with a capacity, an all-gather of s * b * e scores over them.
        """
        config = self.config
        logits = self._logits(input)
        shape = logits.shape
        is_token = None if padding_mask is None else ~padding_mask
        choice = self._choose(logits, is_token, token_ids)
        if self.per_expert_scale is not None:
            choice = replace(choice, probs=choice.probs * self.per_expert_scale)
        if is_token is not None:
            flat = is_token.flatten()[:, None]
            choice = RoutingResult(
                choice.probs * flat, choice.routing_map & flat, choice.scores * flat
            )
        demanded, routing_map, probs = choice.routing_map, choice.routing_map, choice.probs
        dropped = None
        if config.moe_expert_capacity_factor is not None:
            routing_map = self._apply_capacity(choice, shape, is_token, sequences)
            dropped = demanded.sum() - routing_map.sum()
            probs = probs * routing_map
        if self.training and torch.is_grad_enabled():
            if not is_recomputing():
                is_finite = logits.detach().isfinite().all()
                self.load.count(demanded, dropped, is_finite=is_finite, share=self._share())
            probs = self._with_losses(probs, logits, choice, is_token, sequences)
        return probs, routing_map

    def loss_names(self) -> list[str]:
        """Return the names of the losses that this router adds."""
        methods = list(self.config.balance_losses())
        return methods + ["z_loss"] * bool(self.config.moe_z_loss_coeff)

    @torch.no_grad()
    def apply_load(self) -> None:
        """Move the bias towards the experts with too few tokens; remember the shares."""
        assignments = self.load.step_assignments
        if assignments is None:
            return
        total = assignments.sum()  # zero without tokens, which changes nothing
        if self.expert_bias is not None:
            direction = torch.sign(assignments.mean() - assignments).to(self.expert_bias)
            self.expert_bias += self.config.moe_router_bias_update_rate * direction
        if self.global_shares is not None:
            shares = (assignments / total).to(self.global_shares)
            self.global_shares.copy_(torch.where(total > 0, shares, self.global_shares))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move and convert the module, but keep fp32 buffers: the bias changes by tiny steps."""
        kept = {n: b for n, b in self.named_buffers(recurse=False) if b is not None}
        super()._apply(*args, **kwargs)
        for name, buffer in kept.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self

    def _logits(self, x: Tensor) -> Tensor:
        """Return logits [s, b, e], in fp32 at least."""
        config = self.config
        rows = rows_of_rank(x.shape[0], self.routing_groups)
        if self.scale is not None:
            normed = L2Norm(config.hidden_size, config.layernorm_epsilon)(x)
            x = normed * self.scale * config.hidden_size**-0.5
        if config.moe_input_jitter_eps and self.training:
            eps = config.moe_input_jitter_eps
            x = x * keyed_uniform(x, rows).mul_(2 * eps).add_(1.0 - eps).to(x.dtype)
        x = x.to(ROUTER_DTYPES.get(config.moe_router_dtype or "", x.dtype))
        if config.layout_invariant_mode:
            logits = self._logits_of_units(x)
        else:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            logits = F.linear(x, self.weight.to(x.dtype), bias)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if config.moe_router_force_load_balancing:
            # The value is random; the gradient flows to the logits.
            logits = logits + (keyed_uniform(logits, rows) - logits).detach()
        return logits

    def _logits_of_units(self, x: Tensor) -> Tensor:
        """Return the logits [s, b, e] of x [s, b, h]; each unit of the sequence is a product."""
        count = self.config.sequence_units_of_rank
        units = x.chunk(count if x.shape[0] % count == 0 else 1)

        def for_units(parameter: Tensor) -> Sequence[Tensor]:
            # The gradient of one converted weight would be rounded after the sum over units.
            return in_rows(parameter, torch.Size((len(units), *parameter.shape)), x.dtype).unbind()

        weights = for_units(self.weight)
        biases = [None] * len(units) if self.bias is None else for_units(self.bias)
        parts = [
            linear_of_all_rows(unit, weight, bias, SINGLE_RANK, 1)
            for unit, weight, bias in zip(units, weights, biases, strict=True)
        ]
        return torch.cat(parts)

    def _choose(
        self, logits: Tensor, is_token: Tensor | None, token_ids: Tensor | None
    ) -> RoutingResult:
        """Choose the experts of the tokens of logits [s, b, e]; is_token: bool [s, b]."""
        s, b, _ = logits.shape
        table = self.token_experts
        if table is not None and token_ids is None:
            raise RuntimeError("a hash layer got no token ids: pass input_ids on its stage too")

        def replaced(indices: Tensor) -> Tensor:
            if table is not None and token_ids is not None:
                indices = table[token_ids]
            rows = rows_of_rank(s, self.routing_groups)
            return self.router_replay.choose(indices.view(s, b, -1), rows).flatten(0, 1)

        flat = logits.flatten(0, 1)
        if not self.config.routes_by_sinkhorn:
            return topk_routing(flat, self.config, self.expert_bias, replaced)
        real = None if is_token is None else is_token.flatten()
        total = partial(
            sinkhorn,
            sum_over_ranks=self._sum_over_sequences,
            is_token=real,
            is_exact=self.config.layout_invariant_mode,
        )
        balanced = total if self.training else None
        return sinkhorn_routing(flat, self.config, balanced, replaced)

    def _sum_over_sequences(self, x: Tensor) -> Tensor:
        """Sum a small tensor over the ranks that share the micro batch."""
        for group in self._sharing_groups:
            x = collectives.all_reduce(x.clone(), group)
        return x

    @property
    def _sharing_groups(self) -> list[Group]:
        """Groups that together contain the ranks that share the micro batch."""
        groups, cp = self.routing_groups, self.routing_groups.microbatch_cp
        found = [groups.tp_cp] if cp is groups.cp else [groups.tp, cp]
        return [group for group in found if group.size() > 1]

    @property
    def _ranks_per_sample(self) -> int:
        return self.routing_groups.tp.size() * self.routing_groups.microbatch_cp.size()

    def _share(self) -> float:
        """Return this rank's share of the micro batches that its tokens belong to."""
        if self.config.layout_invariant_mode:
            return float(self.routing_groups.cp.rank() == 0)  # thirds have no exact sums
        joined = rng_state().scope.samples
        return (1 if joined is None else joined.count) / self._ranks_per_sample

    def _apply_capacity(
        self,
        choice: RoutingResult,
        shape: torch.Size,
        is_token: Tensor | None,
        sequences: TokenGroups | None,
    ) -> Tensor:
        """Return the choices [t, e] within the capacity of the experts.

        The capacity is computed from the tokens of a whole sequence, on all of its ranks.
        """
        config, policy = self.config, self.config.moe_token_drop_policy
        chosen, numbers = choice.routing_map.view(shape), None
        if sequences is None and is_token is not None:
            sequences = TokenGroups.of_samples(shape, chosen.device)
        # The weight of a chosen expert may round to zero, so -1 marks experts that are not chosen.
        marked = torch.where(chosen, choice.probs.detach().view(shape), -1.0)
        own = rows_of_rank(shape[0], self.routing_groups).positions(marked.device)
        gathered = [marked, own]
        if sequences is not None:
            gathered.append(sequences.numbers)
        for group in self._sharing_groups:
            gathered = [collectives.all_gather(x.contiguous(), group) for x in gathered]
        order = gathered[1].argsort()
        full = gathered[0][order]
        capacity: int | Tensor = expert_capacity(config, len(full))
        if sequences is not None:
            numbers = gathered[2][order]
            lengths = TokenGroups(numbers, sequences.count).sums(
                (full >= 0).any(-1).long().flatten()
            )
            capacity = expert_capacities(config, lengths[numbers, None])
        kept = apply_capacity(full, full >= 0, capacity, policy, numbers)
        return kept[own].flatten(0, 1)

    def _with_losses(
        self,
        probs: Tensor,
        logits: Tensor,
        choice: RoutingResult,
        is_token: Tensor | None,
        sequences: TokenGroups | None,
    ) -> Tensor:
        """Attach the balance losses to the weights."""
        config, losses = self.config, self.config.balance_losses()
        balance_loss = partial(load_balancing_loss, is_exact=config.layout_invariant_mode)
        if not losses and not config.moe_z_loss_coeff:
            return probs
        shape, scores = logits.shape, choice.scores
        joined = rng_state().scope.samples
        batch = TokenGroups.of_all(shape, logits.device)
        if joined is not None:
            own = rows_of_rank(shape[0], self.routing_groups).positions(logits.device)
            places = joined.places.to(logits.device)[own, None]
            batch = TokenGroups(places, max(joined.count, 1))
        count = float(shape[0] * shape[1] * self._ranks_per_sample)
        num_tokens: Tensor | float = count
        weights, real = scores.new_full((1, 1), 1.0 / count), None
        if is_token is not None or joined is not None:
            real = scores.new_ones(len(scores), 1)
            if is_token is not None:
                real = is_token.flatten().to(scores)[:, None]
            lengths = self._sum_over_sequences(batch.sums(real))
            weights, num_tokens = real / batch.of_tokens(lengths.clamp(min=1)), lengths.sum()
        parts: dict[str, tuple[float, Tensor]] = {}
        if "aux_loss" in losses:
            counts = self._sum_over_sequences(batch.sums(choice.routing_map.long()))
            part = balance_loss(scores, _shares(counts), weights, batch)
            parts["aux_loss"] = losses["aux_loss"], part
        if "seq_aux_loss" in losses:
            groups = sequences or TokenGroups.of_samples(shape, logits.device)
            counts = self._sum_over_sequences(groups.sums(choice.routing_map.long()))
            in_groups = weights
            if real is not None or sequences is not None:
                lengths = counts.sum(-1, keepdim=True) / config.moe_router_topk
                in_groups = (1.0 if real is None else real) / groups.of_tokens(lengths.clamp(min=1))
                if joined is None:
                    in_groups = in_groups / (lengths > 0).sum().clamp(min=1)
                else:
                    in_groups = in_groups / joined.num_sequences.to(logits.device)[own, None].clamp(
                        min=1
                    )
            part = balance_loss(scores, _shares(counts), in_groups, groups)
            parts["seq_aux_loss"] = losses["seq_aux_loss"], part
        if "global_aux_loss" in losses:
            assert self.global_shares is not None
            part = balance_loss(scores, self.global_shares[None], weights, batch)
            parts["global_aux_loss"] = losses["global_aux_loss"], part
        if config.moe_z_loss_coeff:
            part = z_loss(logits.flatten(0, 1), weights, is_exact=config.layout_invariant_mode)
            parts["z_loss"] = config.moe_z_loss_coeff, part
        for name, (coefficient, part) in parts.items():
            if not is_recomputing():
                self.load.add(name, part)
            probs = attach_aux_loss(probs, coefficient * part, num_tokens)
        return probs


def expert_capacity(config: TransformerConfig, sequence_length: int) -> int:
    """Return the most tokens of one sequence that an expert takes."""
    assert config.moe_expert_capacity_factor and config.num_moe_experts
    even = sequence_length * config.moe_router_topk / config.num_moe_experts
    return max(1, -int(-even * config.moe_expert_capacity_factor // 1))


def expert_capacities(config: TransformerConfig, lengths: Tensor) -> Tensor:
    """Return the capacity of an expert for sequences of the given lengths, [...] of any shape."""
    assert config.moe_expert_capacity_factor and config.num_moe_experts
    even = lengths.double() * config.moe_router_topk / config.num_moe_experts
    return (even * config.moe_expert_capacity_factor).ceil().long().clamp(min=1)


def _shares(counts: Tensor) -> Tensor:
    """Return counts [..., e] divided by their sum, fp32."""
    counts = counts.float()
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)
