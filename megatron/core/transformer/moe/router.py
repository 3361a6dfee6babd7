"""The router of a mixture-of-experts layer: which experts each token is routed to.

Legend: s sequence, b micro batch, h hidden, e experts; t = s*b tokens of this rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parameters.keyed_draws import keyed_uniform
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.step_context.aux_loss import attach_aux_loss
from megatron.core.tensor_parallel.activation_recompute import is_recomputing
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.transformer.moe.load_balancing import (
    ExpertLoad,
    LoadTrackingRouter,
    load_balancing_loss,
    sequence_load_balancing_loss,
    z_loss,
)
from megatron.core.transformer.moe.router_replay import RouterReplay, rows_of_rank
from megatron.core.transformer.moe.routing import (
    RoutingResult,
    apply_capacity,
    sinkhorn,
    sinkhorn_routing,
    topk_routing,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import collectives

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(LoadTrackingRouter, ParallelLayer):
    """Scores every expert for every token and chooses k of them.

    The ranks of tp x cp share the sequences of a micro batch, each holding other tokens of them,
    also without sequence parallelism: the weight's gradient is partial over `tp`.

    Attributes:
        weight: [e, h]; bias: [e], in models with biases (None in others).
        expert_bias: [e] fp32, added to the scores for the choice; None without it.
        router_replay: records or replays its choices; see there.
        global_shares: [e] fp32, each expert's share of the last step's assignments; None without a
            balance loss over the global batch.
    """

    expert_bias: Tensor | None
    global_shares: Tensor | None

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
        self.pg_collection = groups
        self.is_mtp_layer = is_mtp_layer
        self.num_experts = config.num_moe_experts
        self.topk = config.moe_router_topk
        self.load = ExpertLoad(self.num_experts, 0)
        self.router_replay = RouterReplay()
        axes = ("tp",) if config.tensor_model_parallel_size > 1 else ()
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
        even = torch.full((self.num_experts,), 1.0 / self.num_experts, device=self.weight.device)
        uses_bias = config.moe_router_enable_expert_bias
        uses_shares = "global_aux_loss" in config.balance_losses()
        self.register_buffer("expert_bias", torch.zeros_like(even) if uses_bias else None)
        self.register_buffer("global_shares", even if uses_shares else None)

    def set_layer_number(self, layer_number: int) -> None:
        """Say which layer of the model this is: for logs."""
        self.load.layer_number = layer_number

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for the tokens [s, b, h] of this rank.

        Args:
            padding_mask: bool [s, b], True where there is no token: it is routed to no expert and
                takes no part in any loss.
        Returns:
            (weights [t, e], zero where an expert is not chosen; routing map, bool [t, e]).
        Communication:
            with balance losses, sums of e (or b * e) counts over tp x cp; with a capacity, an
            all-gather of s * b * e scores over tp x cp.
        """
        config = self.config
        logits = self._logits(input)
        shape = logits.shape
        choice = self._choose(logits)
        is_token = None
        if padding_mask is not None:
            is_token = ~padding_mask[..., None]
            flat = is_token.flatten(0, 1)
            choice = RoutingResult(
                choice.probs * flat, choice.routing_map & flat, choice.scores * flat
            )
        demanded, routing_map, probs = choice.routing_map, choice.routing_map, choice.probs
        dropped = None
        if config.moe_expert_capacity_factor is not None:
            routing_map = self._apply_capacity(choice, shape)
            dropped = demanded.sum() - routing_map.sum()
            probs = probs * routing_map
        if self.training and torch.is_grad_enabled():
            if not is_recomputing():
                self.load.count(demanded, dropped, is_finite=logits.detach().isfinite().all())
            probs = self._with_losses(probs, logits, choice, is_token)
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
        total = assignments.sum()  # zero without tokens, which moves nothing
        if self.expert_bias is not None:
            direction = torch.sign(assignments.mean() - assignments).to(self.expert_bias)
            self.expert_bias += self.config.moe_router_bias_update_rate * direction
        if self.global_shares is not None:
            shares = (assignments / total).to(self.global_shares)
            self.global_shares.copy_(torch.where(total > 0, shares, self.global_shares))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move and convert the module, leaving its fp32 state fp32: a bias moves by tiny steps."""
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
        rows = rows_of_rank(x.shape[0], self.pg_collection)
        if config.moe_input_jitter_eps and self.training:
            eps = config.moe_input_jitter_eps
            x = x * keyed_uniform(x, rows).mul_(2 * eps).add_(1.0 - eps).to(x.dtype)
        dtype = ROUTER_DTYPES.get(config.moe_router_dtype or "", x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(x.to(dtype), self.weight.to(dtype), bias)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if config.moe_router_force_load_balancing:
            # The gradient passes as if the logits had been used.
            logits = logits + (keyed_uniform(logits, rows) - logits).detach()
        return logits

    def _choose(self, logits: Tensor) -> RoutingResult:
        """Return the experts of the tokens of logits [s, b, e]."""
        s, b, _ = logits.shape

        def replaced(indices: Tensor) -> Tensor:
            rows = rows_of_rank(s, self.pg_collection)
            return self.router_replay.choose(indices.view(s, b, -1), rows).flatten(0, 1)

        flat = logits.flatten(0, 1)
        if not self.config.routes_by_sinkhorn:
            return topk_routing(flat, self.config, self.expert_bias, replaced)
        total = partial(sinkhorn, sum_over_ranks=self._sum_over_sequences)
        balanced = total if self.training else None
        return sinkhorn_routing(flat, self.config, balanced, replaced)

    def _sum_over_sequences(self, x: Tensor) -> Tensor:
        """Sum a small tensor over the ranks that hold the tokens of the micro batch."""
        group = self.pg_collection.tp_cp
        return x if group.size() == 1 else collectives.all_reduce(x.clone(), group)

    @property
    def _ranks_per_sample(self) -> int:
        return self.pg_collection.tp.size() * self.pg_collection.cp.size()

    def _apply_capacity(self, choice: RoutingResult, shape: torch.Size) -> Tensor:
        """Return the choices [t, e] within the capacity of the experts.

        The capacity is that of a whole sequence, of which this rank holds a part.
        """
        config, group = self.config, self.pg_collection.tp_cp
        length = shape[0] * self._ranks_per_sample
        capacity = expert_capacity(config, length)
        priorities, chosen = choice.probs.detach().view(shape), choice.routing_map.view(shape)
        if group.size() == 1:
            kept = apply_capacity(priorities, chosen, capacity, config.moe_token_drop_policy)
            return kept.flatten(0, 1)
        rows = rows_of_rank(shape[0], self.pg_collection)
        own = rows.positions(priorities.device)
        # A weight may be rounded to zero where an expert is chosen: two values in one message.
        marked = torch.where(chosen, priorities, -1.0)
        everyone = collectives.all_gather(marked.contiguous(), group)
        positions = collectives.all_gather(own, group)
        full = torch.empty_like(everyone)
        full[positions] = everyone
        kept = apply_capacity(full, full >= 0, capacity, config.moe_token_drop_policy)
        return kept[own].flatten(0, 1)

    def _with_losses(
        self, probs: Tensor, logits: Tensor, choice: RoutingResult, is_token: Tensor | None
    ) -> Tensor:
        """Attach the balance losses to the weights."""
        config, losses = self.config, self.config.balance_losses()
        if not losses and not config.moe_z_loss_coeff:
            return probs
        shape = logits.shape
        num_tokens: Tensor | float = float(shape[0] * shape[1] * self._ranks_per_sample)
        if is_token is not None:
            num_tokens = self._sum_over_sequences(is_token.sum().float()).clamp(min=1)
        scores, assignments = choice.scores, choice.routing_map
        parts: dict[str, tuple[float, Tensor]] = {}
        if "aux_loss" in losses or "seq_aux_loss" in losses:
            counts = self._sum_over_sequences(assignments.view(shape).sum(0))  # [b, e]
        if "aux_loss" in losses:
            part = load_balancing_loss(scores, _shares(counts.sum(0)), num_tokens)
            parts["aux_loss"] = losses["aux_loss"], part
        if "seq_aux_loss" in losses:
            lengths: Tensor | float = float(shape[0] * self._ranks_per_sample)
            if is_token is not None:
                lengths = self._sum_over_sequences(is_token.sum((0, 2)).float()).clamp(min=1)
            part = sequence_load_balancing_loss(scores.view(shape), _shares(counts), lengths)
            parts["seq_aux_loss"] = losses["seq_aux_loss"], part
        if "global_aux_loss" in losses:
            assert self.global_shares is not None
            part = load_balancing_loss(scores, self.global_shares, num_tokens)
            parts["global_aux_loss"] = losses["global_aux_loss"], part
        if config.moe_z_loss_coeff:
            mask = None if is_token is None else is_token[..., 0]
            parts["z_loss"] = config.moe_z_loss_coeff, z_loss(logits, mask, num_tokens)
        for name, (coefficient, part) in parts.items():
            if not is_recomputing():
                self.load.add_loss(name, part)
            probs = attach_aux_loss(probs, coefficient * part, num_tokens)
        return probs


def expert_capacity(config: TransformerConfig, sequence_length: int) -> int:
    """Return how many tokens of one sequence an expert takes."""
    assert config.moe_expert_capacity_factor and config.num_moe_experts
    even = sequence_length * config.moe_router_topk / config.num_moe_experts
    return max(1, -int(-even * config.moe_expert_capacity_factor // 1))


def _shares(counts: Tensor) -> Tensor:
    """Return counts [..., e] divided by their sum, fp32."""
    counts = counts.float()
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)
