"""Declare the parameters of a module as shards of a checkpoint.

The metadata of each parameter (`ParamMeta`) describes its split, so one walk over a module declares
the whole state. A module with another storage form overrides `sharded_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import (
    RankOffset,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.parameter_shards import (
    sharded_tensor_for_parameter,
)
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.topology.group import Group


def sharded_state_dict_of(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Mapping[str, object] | None = None,
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> ShardedStateDict:
    """Declare the state of `module` by its `sharded_state_dict`, or by the default walk."""
    declare: Any = getattr(module, "sharded_state_dict", None)
    if declare is not None:
        return declare(prefix, tuple(sharded_offsets), metadata)
    return sharded_state_dict_default(
        module, prefix, sharded_offsets, metadata, pg_collection=pg_collection
    )


def sharded_state_dict_default(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Mapping[str, object] | None = None,
    tp_group: Group | None = None,
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> ShardedStateDict:
    """Declare own parameters and persistent buffers of `module`, then those of its children.

    Args:
        prefix: prefix of the keys, in the returned dict and in the checkpoint.
        sharded_offsets: (axis, rank, fragments) of leading axes that the tensors do not have,
            such as the stack of layers.
        metadata: `dp_cp_group` overrides the group of the data-parallel copies.
        tp_group: overrides the tensor-parallel group of `pg_collection`.
        pg_collection: default the groups of the module, or the current groups.
    """
    groups = pg_collection or getattr(module, "pg_collection", None)
    groups = resolve_groups(groups)
    if tp_group is not None:
        groups = groups.with_groups(tp=tp_group)
    declared: ShardedStateDict = {}
    own: list[tuple[str, Tensor]] = list(module.named_parameters(recurse=False))
    own += [
        (name, buffer)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    for name, tensor in own:
        key = prefix + name
        declared[key] = declare_tensor(key, tensor, groups, sharded_offsets, metadata)
    for name, child in module.named_children():
        declared.update(
            sharded_state_dict_of(
                child, f"{prefix}{name}.", sharded_offsets, metadata, pg_collection=groups
            )
        )
    return declared


def declare_tensor(
    key: str,
    tensor: Tensor,
    groups: ProcessGroupCollection,
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Mapping[str, object] | None = None,
    *,
    copy: int = 0,
) -> ShardedTensor | ShardedTensorFactory:
    """Declare a parameter or buffer [...] from its metadata; `copy` is 1 for a tied copy."""
    meta = get_param_meta(tensor)
    is_expert = meta.split_axis == "expt_tp" or meta.is_expert
    tp = groups.expt_tp if is_expert else groups.tp
    dp = groups.expt_dp if is_expert else groups.dp_cp
    if not is_expert and metadata and "dp_cp_group" in metadata:
        dp = cast(Group, metadata["dp_cp_group"])
    return sharded_tensor_for_parameter(
        key,
        tensor.detach(),
        meta,
        tp_rank=tp.rank(),
        tp_size=tp.size(),
        dp_replica=dp.rank(),
        prepend_offsets=tuple(sharded_offsets),
        copy=copy,
        # The vocabulary is padded for the tensor-parallel size, so its length may differ.
        allow_shape_mismatch=meta.is_embedding_or_output,
    )


def replace_key_prefixes(declared: ShardedStateDict, prefixes: dict[str, str]) -> None:
    """Replace prefixes of checkpoint keys in place, by {old prefix: new prefix}.

    The keys of the dict itself, which are the module's own names, do not change.
    """
    for declaration in declared.values():
        for old, new in prefixes.items():
            if declaration.key.startswith(old):
                declaration.key = new + declaration.key[len(old) :]
                break
