"""The zigzag partition: assign the positions of a sequence to context-parallel ranks.

The sequence is split into 2 * cp chunks, and rank r holds chunks r and 2*cp-1-r. Under a causal
mask an early chunk attends to few keys and a late chunk to many: every such pair has the same cost.
S. Brandon et al., "Striped Attention", section 3, arXiv 2311.09431, describe the imbalance that
this removes; zigzag ring attention uses the same pairs.

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
"""Dimension of the positions to split, for batch entries where it is not dimension 1."""
UNSHARDED_ENTRIES = frozenset({"document_starts"})
"""Batch entries that are not split: attention compares local positions with all others."""


def sequence_shard_of_rank(num_local_rows: int, *, cp: Group, sp: Group) -> SequenceShard:
    """Return the positions of the whole sequence in this rank's activations.

    Args:
        num_local_rows: length of the local activation, s/cp, or s/cp/tp with `sp`.
        cp: context-parallel group.
        sp: tensor-parallel group if sequence parallelism splits the sequence further, else
            `SINGLE_RANK`.
    """
    size, cuts = cp.size(), sp.size()
    rows = SequenceShard.zigzag(num_local_rows * size * cuts, cp.rank(), size)
    return rows.shard(sp.rank(), cuts)


def share_microbatch(batch: Mapping[str, Any]) -> None:
    """Set the context-parallel group of the current micro batch for dynamic context parallelism.

    Args:
        batch: `local_cp_size`, [1] or int, is the number of neighbouring data- and context-parallel
            ranks that split this micro batch; default `--context-parallel-size`. With it,
            `joined_samples`, int64 [1, 4, s], has for each position the index of its sample in the
            packed sequence, the number of the sample in the step, the position in the sample, and
            the number of sequences of the sample.
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
    """Return this rank's positions of a micro batch.

    Args:
        batch: tensors [b, s]; `attention_mask` is [b, 1, s, s] and its query dimension is split.
            None stays None, and `document_starts` stays unsharded.
        cp_group: default the ranks of the current collection that share the micro batch.
    Returns:
        the entries as [b, s/cp] ([b, 1, s/cp, s]), contiguous.
    Raises:
        DataError: s is not a multiple of 2 * cp; all ranks raise, because s is equal on all ranks.
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
    """Return the zigzag shard of rank `rank` in dimension `dim`: [.., s, ..] -> [.., s/cp, ..]."""
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
    """Join the shards of consecutive ranks in ascending order of position.

    Args:
        chunks: [ranks, ...], with the positions of each rank in dimension `dim` of this tensor, for
            all ranks of the group or for consecutive ranks.
    Returns:
        [...], with the positions of all these ranks in dimension dim - 1.
    """
    early, late = chunks.chunk(2, dim)
    pieces = [*early.unbind(0), *late.flip(0).unbind(0)]
    return torch.cat(pieces, dim - 1)


def split_zigzag(full: Tensor, size: int, dim: int = 0) -> Tensor:
    """Undo `join_zigzag`: split ascending positions into [size, ...], one shard per rank."""
    pieces = full.chunk(2 * size, dim)
    return torch.stack([torch.cat((pieces[i], pieces[2 * size - 1 - i]), dim) for i in range(size)])


def shift_left(x: Tensor, distance: int, cp: Group) -> Tensor:
    """Shift the sequence left: position i gets the value of position i + `distance`.

    Args:
        x: [b, s/cp], this rank's zigzag shard, for example token ids or loss weights. It gets no
            gradient.
    Returns:
        [b, s/cp], zeros past the end of the sequence.
    Communication:
        an all-gather on `cp`.
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
