"""Softmax over a split vocabulary, row block by row block.

Each rank computes the softmax of its own columns. One all-gather exchanges a few numbers per row;
every rank merges them in rank order, so that all ranks hold the same bits.
(The merge is the online softmax of Milakov and Gimelshein, arXiv 1805.02867, section 3.)

Shapes: `t` tokens, `v` vocabulary; a slash divides by the size of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.foundation.device import check
from megatron.core.foundation.errors import DataError
from megatron.core.kernels.vocab_softmax import (
    RowStatistics,
    Targets,
    arithmetic_dtype,
    local_softmax,
    logit_rows,
)
from megatron.core.topology.group import Group
from megatron.core.transport import collectives
from megatron.core.transport.transport import tree_sum

IGNORED_LABEL = -100
"""A label without a loss: its loss and its gradient are zero."""


def check_token_ids(
    ids: Tensor, num_valid: int, *, what: str = "token id", ignored: int | None = None
) -> None:
    """Raise if any of `ids` is outside [0, num_valid).

    A split vocabulary masks the ids of other ranks, and would turn such an id into zeros. All ranks
    of a tensor-parallel group have the same ids, so they raise together.

    Args:
        ids: integers of any shape.
        num_valid: number of real ids, without padding of the vocabulary.
        what: the name of an id in the message.
        ignored: an allowed value outside the vocabulary.
    Raises:
        DataError: on the CPU at once. On an accelerator the host does not wait for the check; a
            bad id makes the device fail at its next synchronisation, with this rule in the text.
    """
    if ids.numel() == 0:
        return
    rule = f"ids are in [0, {num_valid}): the vocabulary has {num_valid} entries"
    is_good = (ids >= 0) & (ids < num_valid)
    if ignored is not None:
        is_good |= ids == ignored
    if check(is_good.all(), f"bad {what}: {rule}"):
        return
    low, high = (int(extreme) for extreme in torch.aminmax(ids[~is_good]))
    raise DataError(
        f"{what} {low if low < 0 else high} is outside the vocabulary of {num_valid} entries.",
        rule=rule,
        flags=["--vocab-size", "--tokenizer-type", "--tokenizer-model", "--data-path"],
        fix="train with the tokenizer (and vocabulary size) that the data was preprocessed with",
    )


@dataclass(frozen=True)
class VocabShard:
    """The columns of the logits that this rank holds."""

    first_id: int
    num_local: int
    """Columns here, padding included."""
    num_local_valid: int
    """Number of leading local columns that are real ids."""
    num_valid: int
    """Real ids of the whole vocabulary."""
    group: Group

    @staticmethod
    def of(num_local: int, num_valid: int | None, group: Group) -> VocabShard:
        """Return the shard of this rank: equal, consecutive pieces in rank order."""
        total = num_local * group.size()
        num_valid = total if num_valid is None else num_valid
        first = group.rank() * num_local
        return VocabShard(
            first, num_local, max(0, min(num_local, num_valid - first)), num_valid, group
        )


@dataclass(frozen=True)
class Labels:
    """Labels of t tokens, located in one shard of the vocabulary."""

    columns: Tensor
    """[t, 1] local column of the label; 0 where it belongs to another rank."""
    is_local: Tensor
    """[t, 1] whether the label's column is on this rank."""
    is_ignored: Tensor
    """[t] whether the token is excluded from the loss."""

    @staticmethod
    def locate(target: Tensor, shard: VocabShard) -> Labels:
        """Check labels of any shape and find their columns.

        Raises:
            DataError: a label that is neither a real id nor `IGNORED_LABEL`.
        """
        check_token_ids(target, shard.num_valid, what="label", ignored=IGNORED_LABEL)
        columns = target.reshape(-1, 1) - shard.first_id
        is_local = (columns >= 0) & (columns < shard.num_local_valid)
        return Labels(
            columns.masked_fill(~is_local, 0), is_local, (target == IGNORED_LABEL).reshape(-1)
        )

    def __getitem__(self, rows: slice) -> Labels:
        """Return the labels of some of the tokens."""
        return Labels(self.columns[rows], self.is_local[rows], self.is_ignored[rows])


def cross_entropy_statistics(
    logits: Tensor,
    labels: Labels,
    shard: VocabShard,
    label_smoothing: float,
    *,
    in_place: bool,
) -> RowStatistics:
    """Compute the loss of each row, and the statistics that its gradient needs.

    Args:
        logits: [t, v/tp], contiguous. With `in_place` they are for `cross_entropy_gradient` alone.
    Communication:
        one all-gather of three or four numbers per row on the shard's group.
    """
    numbers = 4 if label_smoothing > 0.0 else 3
    local = logits.new_empty((numbers, logits.shape[0]), dtype=arithmetic_dtype(logits))
    if shard.num_local_valid:
        targets = _targets(labels, shard, label_smoothing)
        logit_rows(logits).measure(logits, targets, local, in_place=in_place)
    else:
        local[0].fill_(-torch.inf)
        local[1:].zero_()
        if in_place:
            logits.zero_()
    return _merge(local, labels, shard, label_smoothing)


def cross_entropy_gradient(
    rows: Tensor,
    out: Tensor,
    statistics: RowStatistics,
    labels: Labels,
    shard: VocabShard,
    label_smoothing: float,
    scale: Tensor | None,
) -> Tensor:
    """Write the gradient of the logits to `out` and return it; all [t, v/tp].

    Args:
        rows: the logits that `cross_entropy_statistics` took; if in place, `out` is `rows`.
        scale: [t], gradient of each row's loss, in the arithmetic dtype; None for ones.
    """
    targets = _targets(labels, shard, label_smoothing)
    logit_rows(rows).gradient(rows, out, statistics, targets, scale)
    return out


def _targets(labels: Labels, shard: VocabShard, label_smoothing: float) -> Targets:
    where = labels.columns, labels.is_local, shard.num_local_valid
    if label_smoothing <= 0.0:
        return Targets(*where)
    epsilon = smoothing_weight(label_smoothing, shard.num_valid)
    return Targets(*where, 1.0 - epsilon, epsilon / shard.num_valid)


@dataclass(frozen=True)
class LocalDistribution:
    """The softmax of some rows over the real columns of this rank, in the arithmetic dtype."""

    highest: Tensor
    """[r] highest logit; -inf where the rank has no real column."""
    log_sum: Tensor
    """[r] logarithm of the sum of exponentials relative to it."""
    probabilities: Tensor
    """[r, c]; they sum to 1 over this rank's columns."""
    relative_logits: Tensor
    """[r, c] logits minus the highest."""


def local_distribution(rows: Tensor, shard: VocabShard, temperature: float) -> LocalDistribution:
    """Return the softmax of logits [r, v/tp], divided by a temperature, of a block of rows."""
    logits = rows[:, : shard.num_local_valid].to(arithmetic_dtype(rows)) / temperature
    if not shard.num_local_valid:
        empty = logits.new_zeros(len(rows))
        return LocalDistribution(empty - torch.inf, empty, logits, logits)
    probabilities = torch.empty_like(logits)
    highest, log_sum = local_softmax(logits, probabilities)
    return LocalDistribution(highest, log_sum, probabilities, logits - highest.unsqueeze(-1))


def log_sum_of_units(rows: Tensor, highest: Tensor, shard: VocabShard, units: int) -> Tensor:
    """Return the logarithm of each row's sum of exponentials, the same in every layout.

    The sums of the units are added in a tree.

    Args:
        rows: [t, v/tp] logits.
        highest: [t], the highest logit of each row in the whole vocabulary.
        units: of the whole vocabulary.
    Returns:
        [t] fp64, relative to `highest`.
    Communication:
        one all-gather of a number per row on the shard's group.
    """
    wide = rows.to(torch.float64, copy=True)
    wide[:, shard.num_local_valid :] = -torch.inf
    wide.sub_(highest.unsqueeze(-1)).exp_()
    local = units // shard.group.size()
    total = tree_sum(list(wide.view(len(wide), local, -1).sum(-1).unbind(1)))
    if shard.group.size() > 1:
        total = tree_sum(list(collectives.all_gather(total.clone().unsqueeze(0), shard.group)))
    return total.log()


@dataclass(frozen=True)
class MergedRows:
    """Numbers of each row, merged over n ranks."""

    highest: Tensor
    """[t] highest logit of all columns."""
    log_sum: Tensor
    """[t] logarithm of the sum of exponentials relative to it."""
    highest_of_ranks: Tensor
    """[n, t]."""
    fractions: Tensor
    """[n, t] probability mass of each rank's columns."""
    others: Tensor
    """[n, k, t] the other numbers of each rank."""

    def mean(self, local_means: Tensor) -> Tensor:
        """Return the mean [t] over all columns, from each rank's mean [n, t] over its columns."""
        has_columns = self.highest_of_ranks > -torch.inf
        return (self.fractions * local_means).masked_fill(~has_columns, 0.0).sum(0)


def merge_rows(local: Tensor, group: Group) -> MergedRows:
    """Combine rows of a split vocabulary, in rank order: the same bits on all ranks.

    Args:
        local: [2 + k, t]: highest logit, log of the sum relative to it, and k other numbers.
    Communication:
        one all-gather of 2 + k numbers per row on `group`.
    """
    if group.size() == 1:
        highest, log_sum = local[0], local[1]
        ones = torch.ones_like(log_sum).unsqueeze(0)
        return MergedRows(highest, log_sum, local[:1], ones, local[2:].unsqueeze(0))
    shared = collectives.all_gather(local.unsqueeze(0), group)  # [tp, 2 + k, t]
    highest = shared[:, 0].amax(0)
    log_sums = shared[:, 0] - highest + shared[:, 1]
    log_sum = log_sums.logsumexp(0)
    fractions = (log_sums - log_sum).exp_()
    return MergedRows(highest, log_sum, shared[:, 0], fractions, shared[:, 2:])


def _merge(
    local: Tensor, labels: Labels, shard: VocabShard, label_smoothing: float
) -> RowStatistics:
    """Combine the statistics of each row over the ranks.

    Args:
        local: [3 or 4, t]: highest logit, log of the sum relative to it, logit of the label (zero
            where it is elsewhere), sum of the logits.
    """
    merged = merge_rows(local, shard.group)
    highest, log_sum = merged.highest, merged.log_sum
    sums, group = merged.others.sum(0), shard.group
    log_probability = sums[0] - highest - log_sum
    loss = -log_probability
    if label_smoothing > 0.0:
        epsilon = smoothing_weight(label_smoothing, shard.num_valid)
        mean = sums[1] / shard.num_valid - highest - log_sum
        loss = (1.0 - epsilon) * loss - epsilon * mean
    return RowStatistics(
        loss=loss.masked_fill(labels.is_ignored, 0.0),
        label_probability=log_probability.exp_(),
        highest=highest,
        log_sum=log_sum,
        local_fraction=merged.fractions[group.rank()] if group.size() > 1 else None,
    )


def smoothing_weight(label_smoothing: float, num_valid: int) -> float:
    """Return the weight of the uniform distribution that leaves 1 - label_smoothing on the label.

    The label has a share of the uniform part too, hence K / (K - 1); Megatron's convention.
    """
    return label_smoothing * num_valid / max(num_valid - 1, 1)
