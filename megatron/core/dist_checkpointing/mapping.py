"""Declarations: what a rank holds of each global tensor.

A layer, an optimizer or a loop *declares* its state; the saver and the loader work on the
declarations and import none of them. A nested dict or list whose leaves are these objects (and
plain values, saved once) is a sharded state dict.

Names and fields follow Megatron's `dist_checkpointing.mapping`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.flat_ranges import Box, boxes_of_flat_range, intersection
from megatron.core.param_meta import ParamMeta

ShardedStateDict = dict[str, Any]
"""Nested dicts and lists of declarations and plain values."""

ReplicaId = int | tuple[int, ...]
"""Which copy of a shard this is; 0 or all zeros is the main one."""

RankOffset = tuple[int, int, int]
"""(axis, rank, fragments): `axis` of the global tensor is cut into `fragments` equal pieces, this
is piece `rank`."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether this copy is the main one (all replica indices are 0)."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


class ShardedBase:
    """Base of the declarations that are stored by key."""

    key: str
    data: Any
    replica_id: ReplicaId

    def without_data(self) -> ShardedBase:
        """Return the declaration alone."""
        return replace(self, data=None)  # type: ignore[type-var]


@dataclass
class ShardedTensor(ShardedBase):
    """A rank's box of a global tensor.

    `global_shape` and `global_offset` have one entry per global axis; the first
    `prepend_axis_num` axes do not exist in `data` (a stack of layers, of experts) and have local
    size 1. `local_shape` is the shape of `data` - before flattening, where `flattened_range` is
    given: then `data` is 1-d and holds only those elements of the flattened box.
    """

    key: str
    data: Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    """The stored tensor may have another global shape (a vocabulary padded for another tensor
    parallel size): the common part is loaded, the rest of `data` keeps its values."""
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Assert that shapes, offsets and data fit together."""
        ndim = len(self.global_shape)
        assert len(self.global_offset) == ndim, self
        assert len(self.local_shape) + self.prepend_axis_num == ndim, self
        for size, offset, length in zip(self.global_shape, *self.box, strict=True):
            assert offset >= 0 and offset + length <= size, self
        if self.data is None:
            return
        assert self.data.dtype == self.dtype, (self.data.dtype, self)
        if self.flattened_range is None:
            assert tuple(self.data.shape) == self.local_shape, (tuple(self.data.shape), self)
        else:
            begin, end = self.flat_bounds
            assert tuple(self.data.shape) == (end - begin,), (tuple(self.data.shape), self)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: RankOffset,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        flattened_range: slice | None = None,
        local_shape: Sequence[int] | None = None,
    ) -> ShardedTensor:
        """Declare an equal piece of a regular grid.

        Args:
            key: name of the global tensor, the same on all ranks and in all layouts.
            data: this rank's piece.
            rank_offsets: (axis, rank, fragments) for each axis that is cut; `axis` counts the
                prepended axes too. An axis not named is whole.
            prepend_axis_num: leading global axes that `data` does not have.
            local_shape: shape of the piece where `data` is only `flattened_range` of it.
        """
        shape = tuple(data.shape) if local_shape is None else tuple(local_shape)
        box_shape = (1,) * prepend_axis_num + shape
        fragments, offset = [1] * len(box_shape), [0] * len(box_shape)
        for axis, rank, pieces in rank_offsets:
            assert 0 <= axis < len(box_shape), (key, axis, box_shape)
            assert 0 <= rank < pieces, (key, axis, rank, pieces)
            fragments[axis], offset[axis] = pieces, rank * box_shape[axis]
        return cls(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=shape,
            global_shape=tuple(n * pieces for n, pieces in zip(box_shape, fragments, strict=True)),
            global_offset=tuple(offset),
            axis_fragmentations=tuple(fragments),
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            allow_shape_mismatch=allow_shape_mismatch,
            flattened_range=flattened_range,
        )

    @property
    def box(self) -> Box:
        """(offset, shape) in the global tensor, ignoring `flattened_range`."""
        return self.global_offset, (1,) * self.prepend_axis_num + self.local_shape

    @property
    def flat_bounds(self) -> tuple[int, int]:
        """[begin, end) of `flattened_range` within the flattened local box."""
        total = math.prod(self.local_shape)
        if self.flattened_range is None:
            return 0, total
        begin, end, step = self.flattened_range.indices(total)
        assert step == 1, self.flattened_range
        return begin, end

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index that selects this box from the global tensor."""
        prepended = self.global_offset[: self.prepend_axis_num]
        rest = self.global_offset[self.prepend_axis_num :]
        return (*prepended, *(slice(o, o + n) for o, n in zip(rest, self.local_shape, strict=True)))

    def pieces(self) -> list[tuple[Box, Tensor | None]]:
        """Return the plain boxes of the global tensor held here, each with its view of `data`.

        Views have the box's full number of axes. One piece, or a few for a flattened range.
        """
        if self.flattened_range is None:
            offset, shape = self.box
            return [(self.box, None if self.data is None else self.data.detach().view(shape))]
        begin, end = self.flat_bounds
        found: list[tuple[Box, Tensor | None]] = []
        position = 0
        prepended = (0,) * self.prepend_axis_num
        for offset, shape in boxes_of_flat_range(self.local_shape, begin, end):
            local_offset = prepended + offset
            place = tuple(g + o for g, o in zip(self.global_offset, local_offset, strict=True))
            full = (1,) * self.prepend_axis_num + shape
            count = math.prod(shape)
            view = None
            if self.data is not None:
                view = self.data.detach()[position : position + count].view(full)
            found.append(((place, full), view))
            position += count
        return found

    def init_data(self, device: torch.device | str) -> None:
        """Allocate uninitialised `data` for loading, if there is none."""
        if self.data is None:
            begin, end = self.flat_bounds
            shape = self.local_shape if self.flattened_range is None else (end - begin,)
            self.data = torch.empty(shape, dtype=self.dtype, device=device)


@dataclass
class ShardedObject(ShardedBase):
    """A rank's plain value (numbers, strings, containers) in a global grid of values."""

    key: str
    data: Any
    global_shape: tuple[int, ...] = (1,)
    global_offset: tuple[int, ...] = (0,)
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        assert len(self.global_shape) == len(self.global_offset), self
        assert all(
            0 <= o < n for o, n in zip(self.global_offset, self.global_shape, strict=True)
        ), self

    @property
    def unique_key(self) -> str:
        """Name of this cell: the key, its offset and the grid's shape."""
        offset = ".".join(map(str, self.global_offset))
        return f"{self.key}/shard_{offset}_{'.'.join(map(str, self.global_shape))}"


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored as several declarations, or under another form.

    `build_fn(key, data, replica_id, flattened_range)` returns a state dict of declarations;
    `merge_fn(loaded)` makes the tensor from the same structure filled with loaded tensors.
    """

    key: str
    data: Tensor = field(repr=False)
    build_fn: Callable[[str, Tensor, ReplicaId, slice | None], Any]
    merge_fn: Callable[[Any], Tensor]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Return the declarations of this factory."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


@dataclass
class LocalNonpersistentObject:
    """A value that is not saved; loading returns `obj` itself."""

    obj: Any

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


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
    """Declare a parameter (or a tensor of the same shape) from its facts.

    Args:
        key: canonical name of the global tensor.
        tensor: this rank's shard; 1-d with `flattened_range` and `local_shape` for a ZeRO piece.
        meta: how the parameter is split. With `meta.stride` > 1 (a gated first MLP layer holds
            [gate_shard; up_shard]) block i of rank r is piece i * tp_size + r of the global
            tensor, so that the stored tensor is the one-device tensor in every layout.
        tp_rank, tp_size: place on `meta.split_axis` (or on the tensor-parallel axis that
            replicates an unsplit parameter).
        dp_replica: this rank's index among the data-parallel copies.
        prepend_offsets: (axis, rank, fragments) of leading axes that the tensor lacks, such as
            (0, layer, num_layers).
        copy: 0 for the owner of the parameter; 1 for a tied copy on another pipeline stage.
    Returns:
        a `ShardedTensor`, or a factory of `meta.stride` of them.
    """
    num_prepended = len(prepend_offsets)
    shape = tuple(tensor.shape) if local_shape is None else tuple(local_shape)
    common: dict[str, Any] = {
        "prepend_axis_num": num_prepended,
        "allow_shape_mismatch": allow_shape_mismatch,
    }
    if meta.split_dim is None or tp_size == 1:
        return ShardedTensor.from_rank_offsets(
            key,
            tensor,
            *prepend_offsets,
            replica_id=(copy, tp_rank, dp_replica),
            flattened_range=flattened_range,
            local_shape=shape,
            **common,
        )
    axis = meta.split_dim % len(shape) + num_prepended
    replica_id = (copy, 0, dp_replica)
    if meta.stride == 1:
        return ShardedTensor.from_rank_offsets(
            key,
            tensor,
            *prepend_offsets,
            (axis, tp_rank, tp_size),
            replica_id=replica_id,
            flattened_range=flattened_range,
            local_shape=shape,
            **common,
        )

    dim, stride = meta.split_dim % len(shape), meta.stride
    block = shape[dim] // stride
    assert block * stride == shape[dim], (key, shape, stride)
    global_shape = tuple(pieces for _, _, pieces in prepend_offsets) + tuple(
        n * tp_size if d == dim else n for d, n in enumerate(shape)
    )
    first = tuple(rank for _, rank, _ in prepend_offsets)

    def build(
        key: str, data: Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """Cut local data (whole, or a flat range of it) at the block borders."""
        bounds = slice(None) if flattened_range is None else flattened_range
        begin, end, _ = bounds.indices(math.prod(shape))
        flat, position = data.detach(), 0
        found = []
        for box in boxes_of_flat_range(shape, begin, end):
            count = math.prod(box[1])
            view = flat if flattened_range is None else flat[position : position + count]
            view = view.view(box[1])
            position += count
            for i in range(stride):
                low = tuple(i * block if d == dim else 0 for d in range(len(shape)))
                high = tuple(block if d == dim else n for d, n in enumerate(shape))
                shared = intersection(box, (low, high))
                if shared is None:
                    continue
                offset, size = shared
                part = view
                for d, (o, b, n) in enumerate(zip(offset, box[0], size, strict=True)):
                    part = part.narrow(d, o - b, n)
                shift = (i * tp_size + tp_rank) * block - i * block
                place = tuple(o + shift if d == dim else o for d, o in enumerate(offset))
                found.append(
                    ShardedTensor(
                        key=key,
                        data=part,
                        dtype=part.dtype,
                        local_shape=size,
                        global_shape=global_shape,
                        global_offset=first + place,
                        replica_id=replica_id,
                        **common,
                    )
                )
        return found

    def merge(loaded: list[Tensor]) -> Tensor:
        """Join the blocks again (whole tensors only: flat ranges are loaded in place)."""
        return torch.cat(loaded, dim)

    return ShardedTensorFactory(key, tensor, build, merge, replica_id, flattened_range)


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
