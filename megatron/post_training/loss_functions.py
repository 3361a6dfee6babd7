"""Losses of preference optimisation, reinforcement learning, reward models and embeddings.

    return logits_of(chunk, batch), partial(grpo_loss_func, batch, clip_ratio=0.2)

The first half has formulas on log-probabilities, rewards and vectors. The second half has loss
functions for the schedules (`..._loss_func`): each takes the output of this rank's model for one
micro batch and returns (loss, report), in every layout. Sums over a sequence include all ranks of
cp. A loss is the mean over the sequences or pairs of its micro batch; the loss of a global batch is
the mean over micro batches of equal size.

Legend: b sequences, s positions, v padded vocabulary, h hidden, p pairs (sequences 2i and 2i + 1),
g samples of a prompt, d width of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.log_probs import (
    vocab_parallel_kl_divergence,
    vocab_parallel_log_probs,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL

Loss = tuple[Tensor, dict[str, Tensor]]
"""Mean loss [] of the micro batch, and values to report, without gradient."""
DPO_KINDS = ("sigmoid", "hinge", "ipo")


class Preferences(NamedTuple):
    """The loss of each pair [p], and the implied rewards [p], without gradient."""

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
            f"kind={kind!r} of a preference loss is unknown.",
            rule=f"the kinds are {', '.join(DPO_KINDS)}",
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
        margin: by how much the reward of the first answer should be higher.
    """
    return -F.logsigmoid(chosen - rejected - margin)


def group_advantages(rewards: Tensor, *, scales: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Return each sample's reward minus the mean reward of its prompt: GRPO's advantage.

    Args:
        rewards: [..., g].
        scales: divide by the standard deviation of the group.
    Returns:
        [..., g].
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (rewards.std(-1, keepdim=True) + epsilon) if scales else centred


def k3_divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return each token's non-negative estimate [...] of KL(policy || reference).

    r - 1 - log r with r = reference / policy: Z. Shao et al., "DeepSeekMath", equation 4, arXiv
    2402.03300.
    """
    log_ratio = reference - log_probs
    return log_ratio.expm1() - log_ratio


class PolicyTerms(NamedTuple):
    """The loss of each token [b, s], and whether its ratio was clipped."""

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
    """Return each token's loss of group relative policy optimisation.

    Z. Shao et al., "DeepSeekMath", equation 3, arXiv 2402.03300: PPO's clipped ratio (arXiv
    1707.06347), and the divergence from the reference in the loss.

    Args:
        log_probs, old_log_probs: [b, s], under the policy and under the policy that sampled the
            tokens.
        advantages: [b, s] or [b, 1]; see `group_advantages`.
        reference_log_probs: [b, s], with `kl_coef`.
        clip_ratio: the ratio is clipped to 1 - clip_ratio ... 1 + clip_ratio.
        clip_ratio_high: replaces `clip_ratio` in the upper bound (Q. Yu et al., "DAPO", section
            3.1, arXiv 2503.14476).
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
                rule="kl_coef weights the divergence from a reference",
                fix="pass reference_log_probs, or kl_coef=0",
            )
        losses = losses + kl_coef * k3_divergence(log_probs, reference_log_probs)
    return PolicyTerms(losses, (clipped < free).detach())


def contrastive_loss(
    queries: Tensor, keys: Tensor, *, temperature: float = 0.05, first: int = 0
) -> Tensor:
    """Return the cross entropy [b] of choosing each query's key among all keys.

    A. van den Oord et al., "Representation Learning with Contrastive Predictive Coding", equation
    4, arXiv 1807.03748; in-batch negatives and temperature as in T. Gao et al., "SimCSE", arXiv
    2104.08821.

    Args:
        queries: [b, d]; keys: [n, d], n at least `first` + b. The function normalises both.
        first: index of the first query's key; the keys of the other queries follow.
    """
    scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).t() / temperature
    own = torch.arange(first, first + len(queries), device=scores.device)
    return F.cross_entropy(scores, own, reduction="none")


def sum_over_sequence(values: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Sum [b, s/cp, ...] over the positions of all ranks of cp: [b, ...].

    Communication:
        an all-reduce on cp; none in backward, because all ranks have the same gradient.
    """
    return reduce_from_tensor_model_parallel_region(values.sum(1), groups.cp)


def dpo_loss_func(
    batch: Mapping[str, Tensor],
    logits: Tensor,
    *,
    num_valid: int | None = None,
    units: int = 1,
    pg_collection: ProcessGroupCollection | None = None,
    **options: Any,
) -> Loss:
    """Return the mean loss of a micro batch of pairs.

    Args:
        batch: `labels` [b, s/cp] and `reference_log_probs` [b, s/cp]; outside of answers labels are
            -100 and log-probabilities 0. Each even sequence is the chosen answer of a pair, the odd
            sequence after it the rejected answer.
        logits: [b, s/cp, v/tp].
        units: see `vocab_parallel_log_probs`.
        options: of `dpo_loss`. "ipo" uses means over tokens.
    Communication: see `vocab_parallel_log_probs`; also all-reduces on cp.
    """
    groups = resolve_groups(pg_collection)
    found = vocab_parallel_log_probs(
        logits, batch["labels"], tp_group=groups.tp, num_valid=num_valid, units=units
    )
    pair = torch.stack((found.log_probs, batch["reference_log_probs"]), dim=-1)
    policy, reference = sum_over_sequence(pair, groups).unbind(-1)
    if options.get("kind") == "ipo":
        lengths = sum_over_sequence((batch["labels"] != IGNORED_LABEL).float(), groups)
        policy, reference = policy / lengths.clamp(min=1), reference / lengths.clamp(min=1)
    found_pairs = dpo_loss(policy[::2], policy[1::2], reference[::2], reference[1::2], **options)
    loss = found_pairs.losses.mean()
    margins = found_pairs.chosen_rewards - found_pairs.rejected_rewards
    return loss, {
        "dpo loss": loss.detach(),
        "reward margin": margins.mean(),
        "reward accuracy": (margins > 0).float().mean(),
    }


def grpo_loss_func(
    batch: Mapping[str, Tensor],
    logits: Tensor,
    *,
    temperature: float = 1.0,
    entropy_coef: float = 0.0,
    num_valid: int | None = None,
    units: int = 1,
    pg_collection: ProcessGroupCollection | None = None,
    **options: Any,
) -> Loss:
    """Return the GRPO loss of a micro batch: averaged over each sequence, then over sequences.

    Args:
        batch: `labels` [b, s/cp], -100 outside of answers; `old_log_probs` [b, s/cp]; `advantages`
            [b, s/cp]; with `kl_coef` `reference_log_probs` [b, s/cp].
        logits: [b, s/cp, v/tp].
        temperature: the sampling temperature of the tokens.
        entropy_coef: the loss subtracts the entropy times this.
        units: see `vocab_parallel_log_probs`.
        options: of `grpo_loss`.
    Communication: see `vocab_parallel_log_probs`; also all-reduces on cp.
    """
    groups = resolve_groups(pg_collection)
    found = vocab_parallel_log_probs(
        logits,
        batch["labels"],
        temperature=temperature,
        tp_group=groups.tp,
        num_valid=num_valid,
        units=units,
    )
    terms = grpo_loss(
        found.log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        batch.get("reference_log_probs"),
        **options,
    )
    mask = (batch["labels"] != IGNORED_LABEL).to(terms.losses.dtype)
    of_tokens = torch.stack(
        (terms.losses - entropy_coef * found.entropy, found.entropy, terms.is_clipped.to(mask)), -1
    )
    lengths = sum_over_sequence(mask, groups).clamp(min=1)
    means = sum_over_sequence(of_tokens * mask.unsqueeze(-1), groups) / lengths.unsqueeze(-1)
    loss, entropy, clipped = means.mean(0).unbind(-1)
    return loss, {
        "policy loss": loss.detach(),
        "entropy": entropy.detach(),
        "clipped": clipped.detach(),
    }


def distillation_loss_func(
    batch: Mapping[str, Tensor],
    teacher_logits: Tensor,
    logits: Tensor,
    *,
    temperature: float = 1.0,
    num_valid: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum over tokens of KL(teacher || model), the number of tokens, and the report.

    Args:
        batch: `labels` [b, s/cp]; positions with label -100 are ignored.
        teacher_logits, logits: [b, s/cp, v/tp]; see `compute_logits`.
        temperature: divides both logits; the loss is multiplied by its square (arXiv 1503.02531,
            section 2), so that the size of the gradient does not depend on it.
    """
    groups = resolve_groups(pg_collection)
    mask = batch["labels"] != IGNORED_LABEL
    divergence = vocab_parallel_kl_divergence(
        logits, teacher_logits, temperature=temperature, tp_group=groups.tp, num_valid=num_valid
    )
    loss, count = (divergence * mask).sum() * temperature**2, mask.sum()
    return loss, count.int(), {"distillation loss": torch.stack((loss.detach(), count.to(loss)))}


def reward_loss_func(
    batch: Mapping[str, Tensor],
    rewards: Tensor,
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> Loss:
    """Return the mean loss of a reward model on a micro batch of pairs.

    Args:
        batch: `loss_mask` [b, s/cp], 1 at the position whose output is the reward of the sequence
            (its last token), 0 elsewhere; optionally `margins` [b, s/cp], the margin of each pair
            at this position of its chosen answer. Even sequences are the chosen answers.
        rewards: [b, s/cp, 1], outputs of a `LinearHead`.
    Communication: an all-reduce on cp.
    """
    groups = resolve_groups(pg_collection)
    mask = batch["loss_mask"]
    margins = batch.get("margins", torch.zeros_like(mask))
    pair = torch.stack((rewards.squeeze(-1).float() * mask, margins * mask), -1)
    scores, margins = sum_over_sequence(pair, groups).unbind(-1)
    chosen, rejected = scores[::2], scores[1::2]
    loss = bradley_terry_loss(chosen, rejected, margins[::2]).mean()
    return loss, {
        "reward loss": loss.detach(),
        "reward accuracy": (chosen > rejected).float().mean().detach(),
    }


def contrastive_loss_func(
    batch: Mapping[str, Tensor],
    vectors: Tensor,
    *,
    temperature: float = 0.05,
    pg_collection: ProcessGroupCollection | None = None,
) -> Loss:
    """Return the mean loss of an embedding model on a micro batch of queries and their keys.

    The negatives of a query are the other keys in the micro batches of all replicas.

    Args:
        batch: `loss_mask` [b, s/cp], 1 at the positions whose mean is the vector of the sequence
            (its last token, or all tokens). Each even sequence is a query, the odd sequence after
            it is its key.
        vectors: [b, s/cp, h], outputs of a `LinearHead` or an `IdentityHead`.
    Communication: an all-reduce on cp; an all-gather of b/2 vectors on dp, backward a
        reduce-scatter.
    """
    groups = resolve_groups(pg_collection)
    mask = batch["loss_mask"].float().unsqueeze(-1)
    both = torch.cat((vectors.float() * mask, mask), -1)
    summed = sum_over_sequence(both, groups)
    pooled = summed[:, :-1] / summed[:, -1:].clamp(min=1)
    queries, own_keys = pooled[::2], pooled[1::2]
    keys = gather_from_sequence_parallel_region(own_keys.contiguous(), group=groups.dp)
    first = groups.dp.rank() * len(queries)
    loss = contrastive_loss(queries, keys, temperature=temperature, first=first).mean()
    return loss, {"contrastive loss": loss.detach()}
