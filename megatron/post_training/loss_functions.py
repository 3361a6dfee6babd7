"""Losses of `losses` as loss functions of the schedules: of one micro batch, in every layout.

    return logits_of(chunk, batch), partial(grpo_loss_func, batch, clip_ratio=0.2)

Each takes what this rank's model returned for its positions, and returns (loss, report). Sums over
a sequence go over the ranks of cp that share it. A loss is the mean over the sequences or pairs of
its micro batch; that of a global batch is the mean over equal micro batches.

Legend: b sequences, s positions, v padded vocabulary, h hidden; pairs are rows 2i and 2i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
from megatron.core.transport import torch_collectives
from megatron.post_training.losses import bradley_terry_loss, contrastive_loss, dpo_loss, grpo_loss

Loss = tuple[Tensor, dict[str, Tensor]]
"""Mean loss [], and what is reported of the micro batch, without gradient."""


def sum_over_sequence(values: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Sum [b, s/cp, ...] over the positions of all ranks of cp: [b, ...].

    Communication:
        an all-reduce on cp; none in backward: every rank continues with the same sum.
    """
    return reduce_from_tensor_model_parallel_region(values.sum(1), groups.cp)


def dpo_loss_func(
    batch: Mapping[str, Tensor],
    logits: Tensor,
    *,
    num_valid: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    **options: Any,
) -> Loss:
    """Return the mean loss of a micro batch of pairs.

    Args:
        batch: `labels` [b, s/cp], -100 outside of answers, and `reference_log_probs` [b, s/cp],
            0 there. Even rows are chosen, the odd row after each is rejected.
        logits: [b, s/cp, v/tp].
        options: of `dpo_loss`. "ipo" takes means over tokens.
    Communication: that of `vocab_parallel_log_probs` and of sums on cp.
    """
    groups = resolve_groups(pg_collection)
    found = vocab_parallel_log_probs(
        logits, batch["labels"], tp_group=groups.tp, num_valid=num_valid
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
    pg_collection: ProcessGroupCollection | None = None,
    **options: Any,
) -> Loss:
    """Return the mean over the sequences of a micro batch of the mean over their tokens.

    Args:
        batch: `labels` [b, s/cp], -100 outside of answers; `old_log_probs` [b, s/cp]; `advantages`
            [b, s/cp]; with `kl_coef` `reference_log_probs` [b, s/cp].
        logits: [b, s/cp, v/tp].
        temperature: with which the tokens were drawn.
        entropy_coef: weight of the entropy, which is to stay high.
        options: of `grpo_loss`.
    Communication: that of `vocab_parallel_log_probs` and of sums on cp.
    """
    groups = resolve_groups(pg_collection)
    found = vocab_parallel_log_probs(
        logits,
        batch["labels"],
        temperature=temperature,
        tp_group=groups.tp,
        num_valid=num_valid,
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
        batch: `labels` [b, s/cp]; -100 takes a position out.
        teacher_logits, logits: [b, s/cp, v/tp]; see `compute_logits`.
        temperature: divides both; the loss is multiplied by its square (arXiv 1503.02531, section
            2), so that its gradient keeps its size.
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
            (its last token), 0 elsewhere; if given `margins` [b, s/cp], of each pair at that
            position of its chosen row. Even rows are chosen.
        rewards: [b, s/cp, 1], of a `LinearHead`.
    Communication: sums on cp.
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

    The keys of all replicas' micro batches are the others of a query.

    Args:
        batch: `loss_mask` [b, s/cp], 1 at the positions whose mean is the vector of the sequence
            (its last token, or all). Even rows are queries, the odd row after each is its key.
        vectors: [b, s/cp, h], of a `LinearHead` or an `IdentityHead`.
    Communication: sums on cp; an all-gather of b/2 vectors on dp, backward a reduce-scatter.
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


def mean_over_replicas(report: Mapping[str, Tensor], groups: ProcessGroupCollection) -> dict:
    """Return the means over dp of numbers [] that loss functions reported.

    Communication: an all-reduce on dp.
    """
    together = torch.stack([value.float() for value in report.values()])
    torch_collectives.all_reduce(together, groups.dp)
    return dict(zip(report, (together / groups.dp.size()).tolist(), strict=True))
