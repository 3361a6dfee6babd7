"""Losses of preference optimisation, reinforcement learning, reward models and embeddings.

Formulas on log-probabilities, rewards and vectors; what ties them to a batch and a layout is
`loss_functions`.

Legend: b sequences, p pairs of sequences, g samples of a prompt, s positions, d width of a vector.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.errors import ConfigError

DPO_KINDS = ("sigmoid", "hinge", "ipo")


class Preferences(NamedTuple):
    """Of each pair: the loss, and the rewards that it implies, without gradient."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> Preferences:
    """Return the loss of direct preference optimisation.

    R. Rafailov et al., "Direct Preference Optimization", section 4, arXiv 2305.18290. "hinge": Y.
    Zhao et al., "SLiC-HF", arXiv 2305.10425. "ipo": M. G. Azar et al., "A General Theoretical
    Paradigm to Understand Learning from Human Preferences", arXiv 2310.12036.

    Args:
        chosen, rejected: [p] log-probabilities of whole answers (for "ipo" their means over
            tokens, as its authors advise), under the policy.
        reference_chosen, reference_rejected: [p], under the reference.
        label_smoothing: probability that a pair is labelled the wrong way round.
    """
    margin = (chosen - rejected) - (reference_chosen - reference_rejected)
    if kind == "sigmoid":
        right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
        losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    elif kind == "hinge":
        losses = torch.relu(1 - beta * margin)
    elif kind == "ipo":
        losses = (margin - 1 / (2 * beta)).square()
    else:
        raise ConfigError(
            f"kind={kind!r} of a preference loss is not known.",
            rule=f"known are {', '.join(DPO_KINDS)}",
            fix="use sigmoid",
        )
    return Preferences(
        losses,
        beta * (chosen - reference_chosen).detach(),
        beta * (rejected - reference_rejected).detach(),
    )


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Return the loss [p] of a reward model that should prefer the first answer of each pair.

    L. Ouyang et al., "Training language models to follow instructions with human feedback", section
    3.5, arXiv 2203.02155; with a margin H. Touvron et al., "Llama 2", section 3.2.2, arXiv
    2307.09288.

    Args:
        chosen, rejected: rewards [p].
        margin: by how much the first is better.
    """
    return -F.logsigmoid(chosen - rejected - margin)


def group_advantages(rewards: Tensor, *, scales: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Return how much better each sample of a prompt is than the others: GRPO's baseline.

    Args:
        rewards: [..., g].
        scales: divide by the standard deviation of the group.
    Returns:
        [..., g].
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (rewards.std(-1, keepdim=True) + epsilon) if scales else centred


def k3_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate [...] of KL(policy || reference) that is never negative, of each token.

    r - 1 - log r with r = reference / policy: Z. Shao et al., "DeepSeekMath", equation 4, arXiv
    2402.03300.
    """
    log_ratio = reference - log_probs
    return log_ratio.expm1() - log_ratio


class PolicyTerms(NamedTuple):
    """Of each token: the loss, and whether its ratio was clipped."""

    losses: Tensor
    is_clipped: Tensor


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    reference_log_probs: Tensor | None = None,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_high: float | None = None,
    kl_coef: float = 0.0,
) -> PolicyTerms:
    """Return the loss of group relative policy optimisation, token by token.

    Z. Shao et al., "DeepSeekMath", equation 3, arXiv 2402.03300: PPO's clipped ratio (arXiv
    1707.06347), and the divergence from the reference in the loss.

    Args:
        log_probs, old_log_probs: [b, s], under the policy and under that which drew the tokens.
        advantages: [b, s] or [b, 1]; see `group_advantages`.
        reference_log_probs: [b, s], with `kl_coef`.
        clip_ratio: how far the ratio may fall below 1, or rise above it.
        clip_ratio_high: another bound above (Q. Yu et al., "DAPO", section 3.1, arXiv 2503.14476).
    """
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    ratio = (log_probs - old_log_probs).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio, 1 + high) * advantages
    losses = -torch.minimum(free, clipped)
    if kl_coef:
        if reference_log_probs is None:
            raise ConfigError(
                f"kl_coef={kl_coef:g} without log-probabilities of the reference.",
                rule="the divergence is that from a reference",
                fix="pass reference_log_probs, or kl_coef=0",
            )
        losses = losses + kl_coef * k3_divergence(log_probs, reference_log_probs)
    return PolicyTerms(losses, (clipped < free).detach())


def contrastive_loss(
    queries: Tensor, keys: Tensor, *, temperature: float = 0.05, first: int = 0
) -> Tensor:
    """Return the loss [b] of telling each query's key from all others.

    A. van den Oord et al., "Representation Learning with Contrastive Predictive Coding", equation
    4, arXiv 1807.03748; in-batch negatives and temperature as in T. Gao et al., "SimCSE", arXiv
    2104.08821.

    Args:
        queries: [b, d]; keys: [n, d], n at least `first` + b. Both are normalised here.
        first: key of the first query; the others follow.
    """
    scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).t() / temperature
    own = torch.arange(first, first + len(queries), device=scores.device)
    return F.cross_entropy(scores, own, reduction="none")
