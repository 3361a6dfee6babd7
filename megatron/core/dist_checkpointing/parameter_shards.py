"""Declare parameters, and optimizer state of their shape, from the metadata of their split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.flat_ranges import Box, boxes_of_shard
from megatron.core.dist_checkpointing.mapping import (
    RankOffset,
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
    bounds_of,
)
from megatron.core.foundation.errors import CheckpointError
from megatron.core.parameters.param_meta import ParamMeta


def sharded_tensor_for_parameter(
    key: str,
    tensor: Tensor,
    meta: ParamMeta,
    *,
    tp_rank: int,
    tp_size: int,
    dp_replica: int,
    prepend_offsets: Sequence[RankOffset] = (),
    copy: int = 0,
    allow_shape_mismatch: bool = False,
    flattened_range: slice | None = None,
    local_shape: Sequence[int] | None = None,
) -> ShardedTensor | ShardedTensorFactory:
    """Declare a parameter (or a tensor of the same shape) from its metadata.

    Args:
        key: canonical name of the global tensor.
        tensor: this rank's shard; 1-d with `flattened_range` and `local_shape` for a ZeRO piece.
        meta: the split of the parameter. With `meta.stride` > 1 (a gated first MLP layer holds
            [gate_shard; up_shard]) the blocks are stored apart (`boxes_of_shard`), so that the
            stored tensor is the same in every layout.
        tp_rank, tp_size: position on `meta.split_axis` (or on the tensor-parallel axis that
            replicates an unsplit parameter).
        dp_replica: this rank's index among the data-parallel copies.
        prepend_offsets: (axis, rank, fragments) of leading axes that the tensor lacks, such as
            (0, layer, num_layers).
        copy: 0 for the owner of the parameter; 1 for a tied copy on another pipeline stage.
    Returns:
        a `ShardedTensor`, or a factory of `meta.stride` of them.
    """
    shape = tuple(tensor.shape) if local_shape is None else tuple(local_shape)
    is_split = meta.split_dim is not None and tp_size > 1
    dim = meta.split_dim % len(shape) if meta.split_dim is not None and shape else 0
    offsets = [*prepend_offsets, *([(dim + len(prepend_offsets), tp_rank, tp_size)] * is_split)]
    declared = ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *offsets,
        replica_id=(copy, 0 if is_split else tp_rank, dp_replica),
        prepend_axis_num=len(prepend_offsets),
        allow_shape_mismatch=allow_shape_mismatch,
        flattened_range=flattened_range,
        local_shape=shape,
    )
    if not is_split or meta.stride == 1:
        return declared
    if shape[dim] % meta.stride:
        raise CheckpointError(
            f"{key!r} of local shape {shape} cannot be split into {meta.stride} blocks along "
            f"dimension {dim}.",
            rule="a tensor with a stride holds that many blocks of equal size",
        )
    return _factory_of_blocks(declared, dim, tp_rank, tp_size, meta.stride)


def _factory_of_blocks(
    shard: ShardedTensor, dim: int, rank: int, size: int, stride: int
) -> ShardedTensorFactory:
    """Return a factory that declares each block of a shard at its offset in the full tensor."""
    assert shard.data is not None
    shape, prepended = shard.local_shape, shard.global_offset[: shard.prepend_axis_num]

    def build(
        key: str, data: Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        bounds = None if flattened_range is None else bounds_of(flattened_range, math.prod(shape))
        return [
            ShardedTensor(
                key,
                _view_of_box(data.detach(), box, shape, bounds),
                data.dtype,
                local_shape=box[1],
                global_shape=shard.global_shape,
                global_offset=prepended + offset,
                replica_id=replica_id,
                prepend_axis_num=shard.prepend_axis_num,
                allow_shape_mismatch=shard.allow_shape_mismatch,
            )
            for box, offset in boxes_of_shard(
                shape, dim, rank=rank, size=size, stride=stride, flat_range=bounds
            )
        ]

    def merge(loaded: list[Tensor]) -> Tensor:
        """Join the blocks again (unsharded state only: flat ranges are loaded in place)."""
        return torch.cat(loaded, dim)

    return ShardedTensorFactory(
        shard.key, shard.data, build, merge, shard.replica_id, shard.flattened_range
    )


def _view_of_box(
    data: Tensor, box: Box, shape: tuple[int, ...], bounds: tuple[int, int] | None
) -> Tensor:
    """Return the elements of a box of a tensor of `shape`.

    Args:
        data: the tensor, or 1-d with only its elements `bounds`.
    """
    if bounds is None:
        for d, (offset, length) in enumerate(zip(*box, strict=True)):
            data = data.narrow(d, offset, length)
        return data
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(o * s for o, s in zip(box[0], strides, strict=True)) - bounds[0]
    return data.as_strided(box[1], strides, data.storage_offset() + first)


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory,
    optim_param: Tensor,
    prefix: str,
    *,
    flattened_range: slice | None = None,
    replica_id: ReplicaId | None = None,
) -> ShardedTensor | ShardedTensorFactory:
    """Declare optimizer state shaped like a parameter, with the parameter's sharding.

    Args:
        model_param: the model's declaration of the parameter.
        optim_param: the state: the parameter's local shape, or 1-d with `flattened_range`.
        prefix: the key becomes `{prefix}.{model_param.key}`.
        flattened_range: the elements of the flattened local parameter that `optim_param` holds.
        replica_id: overrides the parameter's. Ranks that hold different ranges of one parameter
            are not replicas of each other: give each index 0 on the axis that shards the state.
    """
    changes: dict[str, Any] = {
        "key": f"{prefix}.{model_param.key}",
        "data": optim_param,
        "flattened_range": flattened_range,
        "replica_id": model_param.replica_id if replica_id is None else replica_id,
    }
    if isinstance(model_param, ShardedTensor):
        changes["dtype"] = optim_param.dtype
    return replace(model_param, **changes)
