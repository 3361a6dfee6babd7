"""Declarations: which part of each global tensor a rank holds.

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

from megatron.core.dist_checkpointing.flat_ranges import (
    Box,
    boxes_of_flat_range,
    describe_box,
)
from megatron.core.foundation.errors import CheckpointError

ShardedStateDict = dict[str, Any]
"""Nested dicts and lists of declarations and plain values."""

ReplicaId = int | tuple[int, ...]
"""Number of this copy of a shard; 0 or all zeros is the main copy."""

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
    size 1. `local_shape` is the shape of `data`. With `flattened_range` it is the shape before
    flattening: `data` is 1-d and holds only these elements of the flattened box.
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
        """Raise `CheckpointError` unless shapes, offsets and data fit together."""
        ndim, offset = len(self.global_shape), tuple(self.global_offset)
        if len(offset) != ndim or len(self.local_shape) + self.prepend_axis_num != ndim:
            raise self._wrong(
                f"{ndim} global axes, {len(offset)} offsets, {len(self.local_shape)} local and "
                f"{self.prepend_axis_num} prepended axes",
                "local_shape has the global axes but for the prepend_axis_num leading ones",
            )
        ends = zip(self.global_shape, *self.box, strict=True)
        if not all(o >= 0 and o + length <= size for size, o, length in ends):
            raise self._wrong(
                f"box {describe_box(self.box)} outside of global shape {tuple(self.global_shape)}",
                "a shard is within the global tensor",
            )
        if self.data is None:
            return
        if self.data.dtype != self.dtype:
            raise self._wrong(
                f"dtype {self.dtype} and data of {self.data.dtype}", "dtype equals the data's dtype"
            )
        begin, end = self.flat_bounds
        held = tuple(self.local_shape) if self.flattened_range is None else (end - begin,)
        if tuple(self.data.shape) != held:
            raise self._wrong(
                f"data of shape {tuple(self.data.shape)} where {held} is declared",
                "data has local_shape, or one axis with the elements of flattened_range",
            )

    def _wrong(self, found: str, rule: str) -> CheckpointError:
        return CheckpointError(
            f"ShardedTensor {self.key!r} has {found}.",
            rule=rule,
            fix="use ShardedTensor.from_rank_offsets, which computes shapes and offsets",
        )

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
                prepended axes too. An axis not named is not cut.
            prepend_axis_num: leading global axes that `data` does not have.
            local_shape: shape of the piece, if `data` is only its `flattened_range`.
        """
        shape = tuple(data.shape) if local_shape is None else tuple(local_shape)
        box_shape = (1,) * prepend_axis_num + shape
        fragments, offset = [1] * len(box_shape), [0] * len(box_shape)
        for axis, rank, pieces in rank_offsets:
            if not (0 <= axis < len(box_shape) and 0 <= rank < pieces):
                raise CheckpointError(
                    f"rank offset {(axis, rank, pieces)} of {key!r} does not fit a tensor of "
                    f"{len(box_shape)} axes.",
                    rule="an offset is (axis, rank, fragments) with rank < fragments",
                    fix="count the prepended axes too",
                )
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
        return bounds_of(self.flattened_range, total)

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
            corner = tuple(g + o for g, o in zip(self.global_offset, local_offset, strict=True))
            full = (1,) * self.prepend_axis_num + shape
            count = math.prod(shape)
            view = None
            if self.data is not None:
                view = self.data.detach()[position : position + count].view(full)
            found.append(((corner, full), view))
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
        shape, offset = tuple(self.global_shape), tuple(self.global_offset)
        if len(shape) != len(offset) or any(
            not 0 <= o < n for o, n in zip(offset, shape, strict=True)
        ):
            raise CheckpointError(
                f"ShardedObject {self.key!r} has offset {offset} in a grid of shape {shape}.",
                rule="the offset names one cell of the grid",
            )

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


def bounds_of(flattened_range: slice, total: int) -> tuple[int, int]:
    """Return [begin, end) of a range within so many elements."""
    begin, end, step = flattened_range.indices(total)
    if step != 1:
        raise CheckpointError(
            f"flattened_range={flattened_range} has a step of {step}.",
            rule="a flattened range is contiguous",
            fix="declare each contiguous range by itself",
        )
    return begin, end
