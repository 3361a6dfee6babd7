"""Redeclare a rank's state so that this rank alone can save and load it.

A non-persistent checkpoint on a node's own storage holds, per rank, exactly what that rank holds,
whichever part of a global tensor that is. It loads in the same layout only, and needs nobody else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.flat_ranges import describe_box
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.tree import map_leaves


def as_local_state(state: ShardedStateDict) -> ShardedStateDict:
    """Return `state` with each shard declared as a full tensor of its own name.

    The data are the same tensors, so loading into the result fills the given ones.
    """
    seen: Counter[str] = Counter()

    def unique(name: str) -> str:
        seen[name] += 1
        return name if seen[name] == 1 else f"{name}#{seen[name]}"

    def own(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            # Built at once, so that names are numbered in the order of the state.
            parts = map_leaves(own, leaf.build())
            return replace(leaf, build_fn=lambda *_: parts)
        if isinstance(leaf, ShardedTensor):
            name = leaf.key + describe_box(leaf.box)
            if leaf.flattened_range is not None:
                name += f"[{leaf.flat_bounds[0]}:{leaf.flat_bounds[1]}]"
            assert leaf.data is not None, f"{leaf.key} is declared without data"
            return ShardedTensor.from_rank_offsets(unique(name), leaf.data)
        if isinstance(leaf, ShardedObject):
            return ShardedObject(unique(leaf.unique_key.replace("/", "|")), leaf.data)
        return leaf

    return map_leaves(own, state)
