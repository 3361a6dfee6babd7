"""Who holds which positions of a sequence: the zigzag partition.

The sequence is cut into 2 * cp chunks and rank r holds chunks r and 2*cp-1-r. Under a causal mask
a query sees what is before it: an early chunk is cheap and a late one expensive, and every pair
costs the same (S. Brandon et al., "Striped Attention", section 3, arXiv 2311.09431, states the
imbalance that this removes; the pairing is that of zigzag ring attention).

Legend: s whole sequence, b micro batch, cp size of the context-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.errors import DataError
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import resolve_groups
from megatron.core.step_context.context import current_step
from megatron.core.step_context.random_scope import JoinedSamples, SequenceShard
from megatron.core.topology.group import Group
from megatron.core.transport import collectives

SEQUENCE_DIM = {"attention_mask": 2}
"""Where the rows of a batch entry are if not in dimension 1."""
UNSHARDED_ENTRIES = frozenset({"document_starts"})
"""Batch entries that every rank keeps whole: attention compares local rows with all others."""


def sequence_shard_of_rank(num_local_rows: int, *, cp: Group, sp: Group) -> SequenceShard:
    """Return which positions of the whole sequence this rank's activations hold.

    Args:
        num_local_rows: rows of the local activation, s/cp, or s/cp/tp with `sp`.
        cp: context-parallel group.
        sp: tensor-parallel group if sequence parallelism cuts the rows once more, else
            `SINGLE_RANK`.
    """
    size, cuts = cp.size(), sp.size()
    rows = SequenceShard.zigzag(num_local_rows * size * cuts, cp.rank(), size)
    return rows.shard(sp.rank(), cuts)


def share_microbatch(batch: Mapping[str, Any]) -> None:
    """Let the ranks of its `local_cp_size` split the micro batch that is computed from now on.

    Args:
        batch: [1] or int `local_cp_size`, how many neighbours of the data- and context-parallel
            ranks hold this row; without it those of `--context-parallel-size` do. With it
            `joined_samples`, int64 [1, 4, s]: for each position the place of its sample in the row,
            the number of the sample in the step, the position in the sample, and the sequences of
            the sample.
    """
    size, step = batch.get("local_cp_size"), current_step()
    step.cp_group = None if size is None else resolve_groups(None).hybrid_cp[int(size)]
    samples = None
    if "joined_samples" in batch:
        places, numbers, positions, num_sequences = batch["joined_samples"][0]
        first = rng_state().first_sample_of_step
        count = int(batch["num_joined_samples"])
        samples = JoinedSamples(count, places, numbers + first, positions, num_sequences)
    step.random_scope = replace(step.random_scope, samples=samples)


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any], cp_group: Group | None = None
) -> dict[str, Any]:
    """Cut a micro batch to this rank's positions.

    Args:
        batch: tensors [b, s] (`attention_mask` [b, 1, s, s], of which the query rows are cut);
            None stays None, and `document_starts` stays unsharded.
        cp_group: None: the ranks of the current collection that share the micro batch.
    Returns:
        the entries as [b, s/cp] ([b, 1, s/cp, s]), contiguous.
    Raises:
        DataError: s is not a multiple of 2 * cp. All ranks see the same length and raise.
    """
    group = resolve_groups(None).microbatch_cp if cp_group is None else cp_group
    size = group.size()
    if size == 1:
        return dict(batch)
    return {
        name: value
        if value is None or name in UNSHARDED_ENTRIES
        else shard_sequence(value, SEQUENCE_DIM.get(name, 1), group.rank(), size, name)
        for name, value in batch.items()
    }


def shard_sequence(x: Tensor, dim: int, rank: int, size: int, name: str = "tensor") -> Tensor:
    """Return the rows of rank `rank`: [.., s, ..] -> [.., s/cp, ..], the sequence being `dim`."""
    length = x.shape[dim]
    if length % (2 * size):
        raise DataError(
            f"{name} has {length} positions, to be split over {size} context-parallel ranks.",
            rule="each rank holds two equal chunks of the sequence",
            flags=["--seq-length", "--context-parallel-size"],
            fix=f"use a sequence length that divides by {2 * size}, for example"
            f" {-(-length // (2 * size)) * 2 * size}",
        )
    ranges = SequenceShard.zigzag(length, rank, size).ranges
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in ranges], dim)


def join_zigzag(chunks: Tensor, dim: int = 1) -> Tensor:
    """Put the pieces of consecutive ranks in ascending order of position.

    Args:
        chunks: [ranks, ...], the rows of each rank in dimension `dim` (counted with the first).
            All ranks of the group, or a run of neighbours.
    Returns:
        without the first dimension, with as many times the rows in dimension dim - 1.
    """
    early, late = chunks.chunk(2, dim)
    pieces = [*early.unbind(0), *late.flip(0).unbind(0)]
    return torch.cat(pieces, dim - 1)


def split_zigzag(full: Tensor, size: int, dim: int = 0) -> Tensor:
    """Undo `join_zigzag`: rows in ascending order to [size, ...], one piece per rank."""
    pieces = full.chunk(2 * size, dim)
    return torch.stack([torch.cat((pieces[i], pieces[2 * size - 1 - i]), dim) for i in range(size)])


def shift_left(x: Tensor, distance: int, cp: Group) -> Tensor:
    """Return at each position what `x` holds `distance` positions later.

    Args:
        x: [b, s/cp], this rank's zigzag part; no gradient.
    Returns:
        [b, s/cp], zeros where the sequence has ended.
    Communication:
        an all-gather on `cp`: for token ids and weights of tokens, not for activations.
    """
    size = cp.size()
    full = x
    if size > 1:
        pieces = collectives.all_gather(x.contiguous().unsqueeze(0), cp)
        full = join_zigzag(pieces, dim=2)
    shifted = torch.zeros_like(full)
    if distance < full.shape[1]:
        shifted[:, : full.shape[1] - distance] = full[:, distance:]
    return shifted if size == 1 else shard_sequence(shifted, 1, cp.rank(), size)
