"""Begin a mixture of experts with the weights of a dense model.

A. Komatsuzaki et al., "Sparse Upcycling", arXiv 2212.05055: every expert begins as a copy of the
dense MLP, everything else as it was, and the router with its own initial values. Where the weights
of the chosen experts add up to 1 the first outputs are those of the dense model.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.tree import map_leaves

EXPERTS = "experts.experts."
NEW_PARTS = (".mlp.router.", ".mlp.shared_experts.")
NORM, FUSED_NORM = "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"


def is_dense(manifest: Manifest) -> bool:
    """Whether a checkpoint has no experts."""
    return not any(EXPERTS in key for key in manifest.tensors)


def read_from_dense(state: ShardedStateDict, manifest: Manifest) -> ShardedStateDict:
    """Return the declarations of a model with experts, to be filled from a dense checkpoint.

    Every expert asks for the whole MLP of its layer; what a dense model has not (routers, shared
    experts) keeps its values.
    """

    def other(leaf: Any) -> Any:
        if any(part in getattr(leaf, "key", "") for part in NEW_PARTS):
            return LocalNonpersistentObject(leaf.data)
        if isinstance(leaf, ShardedTensorFactory):
            build = leaf.build_fn
            return replace(leaf, build_fn=lambda *args: map_leaves(other, build(*args)))
        if isinstance(leaf, ShardedTensor) and leaf.key not in manifest.tensors:
            return _in_dense(leaf, manifest)
        return leaf

    return map_leaves(other, state)


def _in_dense(wanted: ShardedTensor, manifest: Manifest) -> ShardedTensor:
    found = wanted
    if EXPERTS in found.key:
        axis = found.prepend_axis_num - 1  # that of the experts is last
        found = replace(
            found,
            key=found.key.replace(EXPERTS, ""),
            global_shape=found.global_shape[:axis] + found.global_shape[axis + 1 :],
            global_offset=found.global_offset[:axis] + found.global_offset[axis + 1 :],
            axis_fragmentations=None,
            prepend_axis_num=axis,
        )
    if found.key not in manifest.tensors:
        found = replace(found, key=found.key.replace(NORM, FUSED_NORM))
    numbered = re.fullmatch(r"(.*layers\.)(\d+)\.(.*)", found.key)
    if found.key not in manifest.tensors and numbered:
        # Equal layers of a dense model are stored as one stack.
        key = numbered[1] + numbered[3]
        if key in manifest.tensors:
            found = replace(
                found,
                key=key,
                global_shape=(manifest.tensors[key].shape[0], *found.global_shape),
                global_offset=(int(numbered[2]), *found.global_offset),
                axis_fragmentations=None,
                prepend_axis_num=found.prepend_axis_num + 1,
            )
    return found if found.key in manifest.tensors else wanted
