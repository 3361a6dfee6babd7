"""The choice of experts and their weights: pure functions of the router's logits.

Top-k gating: N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
Mixture-of-Experts Layer", section 2.1, arXiv 1701.06538. Groups of experts, sigmoid scores and the
bias of the choice: "DeepSeek-V3 Technical Report", section 2.1.2, arXiv 2412.19437. Balanced
assignment: A. Clark et al., "Unified Scaling Laws for Routed Language Models", section 2.1.2,
arXiv 2202.01169.

Legend: t tokens of this rank, e experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parameters.exact_sum import row_sum
from megatron.core.tensor_parallel.unit_products import in_full_vectors
from megatron.core.transformer.transformer_config import TransformerConfig

SINKHORN_TOLERANCE = 1e-4
"""The iteration ends when the mean change of an expert's factor is below this."""
PRIORITY_BITS = 12
"""Significant bits of the weights that rank the tokens of an expert with limited capacity."""
MAX_SINKHORN_ROUNDS = 100


Replaced = Callable[[Tensor], Tensor]
"""Maps the chosen experts [t, k] to the experts to use."""


@dataclass(frozen=True)
class RoutingResult:
    """The experts of every token.

    probs: [t, e], the weight of each chosen expert, 0 elsewhere; differentiable.
    routing_map: bool [t, e], True where chosen.
    scores: [t, e], scores of all experts, which sum to 1; differentiable. For balance losses.
    """

    probs: Tensor
    routing_map: Tensor
    scores: Tensor


def topk_routing(
    logits: Tensor,
    config: TransformerConfig,
    expert_bias: Tensor | None = None,
    replaced: Replaced = lambda chosen: chosen,
) -> RoutingResult:
    """Choose k experts for every token.

    Args:
        logits: [t, e], fp32 or fp64.
        expert_bias: [e], added to the scores for the choice, not for the weights.
        replaced: maps the chosen experts [t, k] to the experts to use.
    """
    k = config.moe_router_topk
    kind = config.moe_router_score_function
    if kind == "softmax":
        scores = torch.softmax(logits, -1)
        weighed = scores if config.moe_router_pre_softmax else logits
        ranked = weighed if expert_bias is None else scores + expert_bias
        indices = replaced(_topk_experts(ranked.detach(), k, config))
        chosen = weighed.gather(-1, indices)
        weights = chosen if config.moe_router_pre_softmax else torch.softmax(chosen, -1)
    else:
        score = torch.sigmoid if kind == "sigmoid" else _sqrt_softplus
        raw = in_full_vectors(score, logits) if config.layout_invariant_mode else score(logits)
        ranked = raw.detach() if expert_bias is None else raw.detach() + expert_bias
        indices = replaced(_topk_experts(ranked, k, config))
        chosen = raw.gather(-1, indices)
        weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if k > 1 else chosen
        scores = raw / (raw.sum(-1, keepdim=True) + 1e-20)
    if config.moe_router_topk_scaling_factor:
        weights = weights * config.moe_router_topk_scaling_factor
    return _scatter_probs(weights, indices, scores)


def sinkhorn_routing(
    logits: Tensor,
    config: TransformerConfig,
    balanced: Callable[[Tensor], Tensor] | None,
    replaced: Replaced = lambda chosen: chosen,
) -> RoutingResult:
    """Choose experts by a balanced assignment; their weights are the scores of the logits.

    Args:
        balanced: turns logits into an assignment [t, e]; None (outside of training) chooses by
            scores.
        replaced: maps the chosen experts [t, k] to the experts to use.
    """
    k = config.moe_router_topk
    scores = torch.softmax(logits, -1)
    weights = scores
    if k == 1 and config.layout_invariant_mode:
        weights = in_full_vectors(torch.sigmoid, logits)
    elif k == 1:
        weights = torch.sigmoid(logits)
    with torch.no_grad():
        ranked = weights if balanced is None else balanced(logits.float())
        indices = replaced(ranked.topk(k, -1).indices)
    return _scatter_probs(weights.gather(-1, indices), indices, scores)


@torch.no_grad()
def sinkhorn(
    logits: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor],
    is_token: Tensor | None = None,
    *,
    is_exact: bool = False,
) -> Tensor:
    """Scale exp(logits) so that every token gives 1/t and every expert receives 1/e.

    Args:
        logits: [t, e] of this rank; the assignment balances the tokens of all ranks together.
        sum_over_ranks: sums a small tensor over the ranks that share the micro batch.
        is_token: bool [t], False for padding, which contributes nothing.
        is_exact: add the shares of the tokens exactly, in any order.
    Communication: one sum of e numbers per round.
    """
    # A token's own factor drops out of the assignment: shift each by its largest logit.
    shifted = logits - logits.amax(-1, keepdim=True)
    cost = in_full_vectors(torch.exp, shifted) if is_exact else torch.exp(shifted)
    num_tokens, num_experts = logits.shape
    total = torch.tensor([float(num_tokens)], device=logits.device)
    if is_token is not None:
        cost, total = cost * is_token[:, None], is_token.sum(0, keepdim=True).to(total)
    total = sum_over_ranks(total)
    by_expert = torch.ones(num_experts, device=logits.device)
    by_token = torch.ones(num_tokens, device=logits.device)
    for _ in range(MAX_SINKHORN_ROUNDS):
        by_token = 1.0 / (total * ((cost * by_expert).sum(-1) + 1e-8))
        given = cost * by_token[:, None]
        received = sum_over_ranks(row_sum(given) if is_exact else given.sum(0)).to(cost.dtype)
        updated = 1.0 / (num_experts * (received + 1e-8))
        change = (updated - by_expert).abs().mean()
        by_expert = updated
        if float(change) < SINKHORN_TOLERANCE:
            break
    return cost * by_expert * by_token[:, None]


def _sqrt_softplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


def _topk_experts(ranked: Tensor, k: int, config: TransformerConfig) -> Tensor:
    """Return the indices [t, k] of the best experts, in the best groups if experts are grouped."""
    groups, kept = config.moe_router_num_groups, config.moe_router_group_topk
    if groups and kept and kept < groups:
        in_groups = ranked.unflatten(-1, (groups, -1))
        judges = config.moe_router_group_score_topk or k // kept
        group_scores = in_groups.topk(judges, -1).values.sum(-1)
        best_groups = group_scores.topk(kept, -1).indices
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, True)
        ranked = in_groups.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
    return ranked.topk(k, -1).indices


def _scatter_probs(weights: Tensor, indices: Tensor, scores: Tensor) -> RoutingResult:
    """Write the weights [t, k] of the chosen experts into a map over all experts."""
    probs = torch.zeros_like(scores).scatter(-1, indices, weights)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True)
    return RoutingResult(probs, chosen, scores)


def apply_capacity(
    priorities: Tensor,
    chosen: Tensor,
    capacity: int | Tensor,
    policy: str,
    sequences: Tensor | None = None,
) -> Tensor:
    """Drop choices so that an expert takes at most `capacity` tokens of a sequence.

    Args:
        priorities: [s, b, e], the weights of the choices, in order of position.
        chosen: bool [s, b, e].
        capacity: a number, or [s, b, 1], the capacity in the sequence of each token.
        policy: "probs" keeps the choices with the largest weights (and the first of weights that
            are equal to three digits), "position" keeps the first.
        sequences: int64 [s, b], the sequence of each token, non-decreasing along s; default one
            sequence.
    """
    place = torch.arange(len(chosen), device=chosen.device).view(-1, 1, 1)
    begin = torch.zeros_like(place)
    if sequences is not None:
        is_first = F.pad(sequences.diff(dim=0) != 0, (0, 0, 1, 0), value=True)[..., None]
        begin = torch.where(is_first, place, 0).cummax(0).values
    if policy == "position":
        before = chosen.cumsum(0) - chosen.long()
        before = before - before.gather(0, begin.expand_as(before))
        return chosen & (before < capacity)
    # Weights of equal tokens (such as the first tokens of documents) differ in their last bits
    # only, and these bits depend on the layout.
    mantissa, exponent = torch.frexp(priorities)
    rounded = torch.ldexp((mantissa * 2**PRIORITY_BITS).round(), exponent)
    ranked = rounded.masked_fill(~chosen, -1.0)
    order = ranked.sort(dim=0, descending=True, stable=True).indices
    if sequences is not None:
        by_sequence = sequences[..., None].expand_as(order).gather(0, order)
        order = order.gather(0, by_sequence.sort(dim=0, stable=True).indices)
    fits = (place - begin < capacity).expand_as(chosen)
    return chosen & torch.zeros_like(chosen).scatter_(0, order, fits)
