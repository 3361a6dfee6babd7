"""Put the state dicts of tensor- and pipeline-parallel ranks together, as boxes of full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.flat_ranges import boxes_of_shard
from megatron.core.dist_checkpointing.interop.contents import ContentsBuilder
from megatron.core.dist_checkpointing.interop.gpt_names import (
    canonical_name,
    is_gated_mlp,
    num_layers,
    split_of,
    with_layer_offset,
)
from megatron.core.dist_checkpointing.interop.stored_view import StoredView
from megatron.core.foundation.errors import shown

Tensors = Mapping[str, StoredView]
"""One rank's parameters by their name in the file, in the order of the model."""


class StageNames:
    """The keys of one pipeline stage (or virtual stage): local layer numbers become global."""

    def __init__(self, tensors: Tensors, layer_offset: int) -> None:
        self.keys = {
            name: with_layer_offset(canonical_name(name), layer_offset) for name in tensors
        }
        self.num_layers = num_layers([canonical_name(name) for name in tensors])
        self.is_gated = is_gated_mlp({canonical_name(name): view for name, view in tensors.items()})


def add_stage(
    builder: ContentsBuilder,
    names: StageNames,
    ranks: Sequence[Tensors],
    *,
    prefix: str = "",
    where: Path,
) -> list[str]:
    """Add the parameters of one stage, or state of their shapes.

    Args:
        ranks: per tensor-parallel rank, tensors by the names of the file.
        prefix: of the keys, for optimizer state.
        where: the directory, for messages.
    Returns:
        names that were left out, because it is not known how ranks split them.
    """
    unknown = []
    for name, first in ranks[0].items():
        views = [rank.get(name) for rank in ranks]
        if any(v is None or v.shape != first.shape or v.dtype != first.dtype for v in views):
            raise DamagedCheckpointError(
                f"{where}: {shown(name, 120)} is not the same on all tensor-parallel ranks.",
                rule="ranks of one stage hold equal shares of the same parameters",
            )
        key = names.keys[name]
        split = split_of(key, is_gated=names.is_gated)
        if split is None and len(ranks) > 1:
            unknown.append(key)
            continue
        shards = [view for view in views if view is not None]
        dim = split.dim if split is not None else None
        if dim is None or len(ranks) == 1:
            builder.add_whole(prefix + key, first)
            continue
        shape = tuple(n * len(ranks) if d == dim else n for d, n in enumerate(first.shape))
        builder.declare(prefix + key, first.dtype, shape)
        blocks = 2 if split is not None and split.is_gated else 1
        for rank, view in enumerate(shards):
            for box, offset in boxes_of_shard(
                first.shape, dim, rank=rank, size=len(ranks), stride=blocks
            ):
                builder.add(prefix + key, offset, view.narrow(box))
    return unknown
