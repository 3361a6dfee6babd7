"""Softmax over a split vocabulary, row block by row block.

Each rank computes the softmax of its own columns; what the ranks must share is a few numbers a
row, exchanged in one all-gather and merged in rank order, so that all of them hold the same bits.
(The merge is the online softmax of Milakov and Gimelshein, arXiv 1805.02867, section 3.)

Shapes: `t` tokens, `v` vocabulary; a slash divides by the size of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.kernels.vocab_softmax import (
    arithmetic_dtype,
    local_softmax,
    row_blocks,
    row_softmax,
    scratch_block,
)
from megatron.core.tensor_parallel.token_ids import check_token_ids
from megatron.core.topology.group import Group
from megatron.core.transport import collectives

IGNORED_LABEL = -100
"""A label that takes no part in the loss: its loss and its gradient are zero."""


@dataclass(frozen=True)
class VocabShard:
    """The columns of the logits that this rank holds."""

    first_id: int
    num_local: int
    """Columns here, padding included."""
    num_local_valid: int
    """Columns here that are real ids; they come first."""
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
    """Labels of t tokens, seen from one shard of the vocabulary."""

    columns: Tensor
    """[t, 1] local column of the label; 0 where it belongs to another rank."""
    is_local: Tensor
    """[t, 1] whether the label's column is on this rank."""
    is_ignored: Tensor
    """[t] whether the token takes no part in the loss."""

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


@dataclass(frozen=True)
class RowStatistics:
    """What forward leaves for backward, [t] each, in the arithmetic dtype."""

    loss: Tensor
    label_probability: Tensor
    """Probability of the label: the gradient there is p - 1, which would cancel in bf16."""
    local_fraction: Tensor
    """Probability mass of this rank's columns: global softmax = local softmax * share."""


def softmax_statistics(
    logits: Tensor,
    labels: Labels,
    shard: VocabShard,
    label_smoothing: float,
    *,
    in_place: bool,
) -> RowStatistics:
    """Compute the loss of each row, and what its gradient needs.

    Args:
        logits: [t, v/tp], contiguous. With `in_place` they are replaced by the softmax over the
            local columns (padding: zeros), rounded to their dtype.
    Communication:
        one all-gather of three or four numbers per row on the shard's group.
    """
    rows, valid = logits.shape[0], shard.num_local_valid
    dtype, device = arithmetic_dtype(logits), logits.device
    label_logit = logits.gather(1, labels.columns).to(dtype).masked_fill_(~labels.is_local, 0.0)
    local = torch.empty((4 if label_smoothing > 0.0 else 3, rows), dtype=dtype, device=device)
    local[2] = label_logit.squeeze(1)
    if valid == 0:
        local[0].fill_(-torch.inf)
        local[1].zero_()
        local[3:].zero_()
        if in_place:
            logits.zero_()
    else:
        columns = logits[:, :valid]
        local[0], local[1] = row_softmax(
            columns,
            out=columns if in_place else None,
            sums=local[3] if label_smoothing > 0.0 else None,
        )
        if in_place and valid < shard.num_local:
            logits[:, valid:].zero_()
    return _merge(local, labels, shard, label_smoothing)


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


@dataclass(frozen=True)
class MergedRows:
    """What the ranks know of each row, together; n ranks."""

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
        """Return the mean [t] of what is [n, t] the mean over each rank's own distribution."""
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
    """Combine what the ranks know of each row.

    Args:
        local: [3 or 4, t]: highest logit, log of the sum relative to it, logit of the label (zero
            where it is elsewhere), sum of the logits.
    """
    merged = merge_rows(local, shard.group)
    highest, log_sum = merged.highest, merged.log_sum
    local_fraction, sums = merged.fractions[shard.group.rank()], merged.others.sum(0)
    log_probability = sums[0] - highest - log_sum
    loss = -log_probability
    if label_smoothing > 0.0:
        epsilon = smoothing_weight(label_smoothing, shard.num_valid)
        mean = sums[1] / shard.num_valid - highest - log_sum
        loss = (1.0 - epsilon) * loss - epsilon * mean
    return RowStatistics(
        loss=loss.masked_fill(labels.is_ignored, 0.0),
        label_probability=log_probability.exp_(),
        local_fraction=local_fraction,
    )


def smoothing_weight(label_smoothing: float, num_valid: int) -> float:
    """Return the weight of the uniform distribution that leaves 1 - label_smoothing on the label.

    The label has a share of the uniform part too, hence K / (K - 1); Megatron's convention.
    """
    return label_smoothing * num_valid / max(num_valid - 1, 1)


def softmax_to_gradient(
    softmax: Tensor,
    statistics: RowStatistics,
    labels: Labels,
    shard: VocabShard,
    label_smoothing: float,
    scale: Tensor | None,
) -> Tensor:
    """Turn the local softmax [t, v/tp] into the gradient of the logits, in place.

    Args:
        scale: [t], gradient of each row's loss, in the arithmetic dtype; None for ones.
    """
    coefficient = statistics.local_fraction if scale is None else statistics.local_fraction * scale
    if scale is not None or shard.group.size() > 1:
        multiply_rows(softmax, coefficient)
    return add_label_terms(softmax, statistics, labels, shard, label_smoothing, scale)


def multiply_rows(x: Tensor, coefficient: Tensor) -> None:
    """Multiply the rows of x [t, c] by coefficients [t] in place, rounding once."""
    if x.dtype == coefficient.dtype:
        x.mul_(coefficient.unsqueeze(-1))
        return
    rows, columns = x.shape
    scratch = scratch_block(x, columns)
    for block in row_blocks(rows, columns, x.device):
        part = scratch[: block.stop - block.start].copy_(x[block])
        x[block].copy_(part.mul_(coefficient[block].unsqueeze(-1)))


def add_label_terms(
    gradient: Tensor,
    statistics: RowStatistics,
    labels: Labels,
    shard: VocabShard,
    label_smoothing: float,
    scale: Tensor | None,
) -> Tensor:
    """Complete scale * p, [t, v/tp], to the gradient: minus the label's and the uniform part.

    Args:
        scale: [t], the gradient of each token's loss; None is 1.
    """
    at_label = statistics.label_probability - 1.0
    if label_smoothing > 0.0:
        epsilon = smoothing_weight(label_smoothing, shard.num_valid)
        uniform = epsilon / shard.num_valid
        at_label = statistics.label_probability - (1.0 - epsilon) - uniform
        valid = gradient[:, : shard.num_local_valid]
        if scale is None:
            valid.sub_(uniform)
        else:
            valid.sub_((scale * uniform).to(gradient.dtype).unsqueeze(-1))
    if scale is not None:
        at_label = at_label * scale
    present = gradient.gather(1, labels.columns)
    at_label = torch.where(labels.is_local, at_label.to(gradient.dtype).unsqueeze(-1), present)
    # scatter_ would copy the full tensor on the CPU.
    every_row = torch.arange(gradient.shape[0], device=gradient.device)
    return gradient.index_put_((every_row, labels.columns.squeeze(1)), at_label.squeeze(1))
