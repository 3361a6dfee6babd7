"""Sharded parameters in checkpoints and state dicts: every rank declares the ranges it owns.

Keys and stored form are the same as for full parameters, so any stage loads the checkpoints of any
other stage. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed.parameter_shard import ParameterShard
from megatron.core.utils import unwrap_model

Sharded = Mapping[nn.Parameter, Sequence[ParameterShard]]
"""Parameters whose values are sharded, each with the pieces that this rank owns."""


def declare_replicated(module: nn.Module, replica: int, prefix: str = "") -> dict[str, Any]:
    """Declare every tensor of a module's state dict as whole and equal on all replicas."""
    state = module.state_dict(keep_vars=True)
    return {
        prefix + name: ShardedTensor.from_rank_offsets(prefix + name, value, replica_id=replica)
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def declare_shards(
    module: nn.Module, declared: Mapping[str, Any], sharded: Sharded, prefix: str = ""
) -> dict[str, Any]:
    """Replace declarations of sharded parameters by declarations of the ranges that this rank owns.

    A parameter is left out if this rank owns no part of it.
    """
    parameters = unwrap_model(module).named_parameters(remove_duplicate=False)
    shards_of = {prefix + name: sharded[p] for name, p in parameters if p in sharded}
    found: dict[str, Any] = {}
    for name, declaration in declared.items():
        if name not in shards_of:
            found[name] = declaration
        elif pieces := [_declare(declaration, shard) for shard in shards_of[name]]:
            found[name] = pieces[0] if len(pieces) == 1 else pieces
    return found


def load_full_state(
    module: nn.Module, state_dict: Mapping[str, object], sharded: Sharded, *, strict: bool
) -> Any:
    """Load full tensors or what `declare_shards` declared; the shards are written in place."""
    ours: set[str] = set()
    rest = dict(state_dict)
    inner = unwrap_model(module)
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        if parameter in sharded:
            ours.add(name)
            value = rest.pop(name, None)
            pieces = value if isinstance(value, list) else [value] * len(sharded[parameter])
            for shard, piece in zip(sharded[parameter], pieces, strict=True):
                if isinstance(piece, Tensor):
                    write_shard(shard, piece)
    result = inner.load_state_dict(rest, strict=False)
    missing = [name for name in result.missing_keys if name not in ours]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(f"missing keys {missing}, unexpected keys {result.unexpected_keys}")
    return result


@torch.no_grad()
def write_shard(shard: ParameterShard, value: Tensor) -> None:
    """Set a shard to `value`, which has the shape of the full parameter or of the shard."""
    if value.data_ptr() == shard.values.data_ptr():
        return  # loaded in place
    flat = value.reshape(-1)
    if flat.numel() == shard.parameter.numel():
        flat = flat[shard.begin : shard.end]
    shard.values.copy_(flat.view_as(shard.values))


def _declare(
    declaration: ShardedTensor | ShardedTensorFactory, shard: ParameterShard
) -> ShardedTensor | ShardedTensorFactory:
    # Owners of different ranges are no copies of each other.
    replica_id, replica = declaration.replica_id, shard.mesh.replicate.rank()
    is_full = shard.is_full
    return replace(
        declaration,
        data=shard.values.detach(),
        flattened_range=None if is_full else slice(shard.begin, shard.end),
        replica_id=(*replica_id[:-1], replica) if isinstance(replica_id, tuple) else replica,
    )
