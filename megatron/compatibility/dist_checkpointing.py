"""Names of `megatron.core.dist_checkpointing` and `megatron.training.checkpointing`.

There is one checkpoint format, and every rank writes its share. All of Megatron's strategies name
this format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.async_save import AsyncSave
from megatron.core.dist_checkpointing.manifest import BACKEND
from megatron.core.dist_checkpointing.mapping import (
    RankOffset,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.dist_checkpointing.tree import leaves
from megatron.core.foundation.errors import CheckpointError, ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import Group
from megatron.core.utils import get_pg_rank, get_pg_size

# Declarations ---------------------------------------------------------------------------


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Sequence[RankOffset] = (),
    *,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
    **options: Any,
) -> ShardedTensor:
    """Declare a tensor that is split equally along `tp_axis` over the tensor-parallel ranks."""
    groups = ProcessGroupCollection.current()
    tp, dp = tp_group or groups.tp, dp_cp_group or groups.dp_cp
    num_before = len(prepend_offsets)
    return make_sharded_tensor_for_checkpoint(
        tensor,
        key,
        (*prepend_offsets, (tp_axis + num_before, get_pg_rank(tp), get_pg_size(tp))),
        (0, 0, get_pg_rank(dp)) if replica_id is None else replica_id,
        prepend_axis_num=num_before,
        **options,
    )


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Sequence[RankOffset] = (),
    replica_id: ReplicaId | None = None,
    *,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
    **options: Any,
) -> ShardedTensor:
    """Declare a tensor that is replicated over the tensor-parallel ranks."""
    groups = ProcessGroupCollection.current()
    ranks = get_pg_rank(tp_group or groups.tp), get_pg_rank(dp_cp_group or groups.dp_cp)
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *prepend_offsets,
        replica_id=(0, *ranks) if replica_id is None else replica_id,
        **{"prepend_axis_num": len(prepend_offsets), **options},
    )


def make_sharded_tensors_for_checkpoint(
    state_dict: dict[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: dict[str, int] | None = None,
    sharded_offsets: Sequence[RankOffset] = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> ShardedStateDict:
    """Declare a module's own state dict.

    Args:
        tensor_parallel_layers_axis_map: name -> axis along which this tensor is split; other
            tensors are replicated over the tensor-parallel ranks.
        extra_state_suffix: names with this suffix have an object as value, not a tensor.
    """
    axes = tensor_parallel_layers_axis_map or {}
    groups: dict[str, Any] = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    declared: ShardedStateDict = {}
    for name, value in state_dict.items():
        key = prefix + name
        if name.endswith(extra_state_suffix):
            current = ProcessGroupCollection.current()
            offsets: tuple[int, ...] = (0,)
            shape: tuple[int, ...] = (1,)
            if sharded_offsets:
                offsets = tuple(rank for _, rank, _ in sharded_offsets)
                shape = tuple(pieces for _, _, pieces in sharded_offsets)
            ranks = get_pg_rank(tp_group or current.tp), get_pg_rank(dp_cp_group or current.dp_cp)
            declared[key] = ShardedObject(key, value, shape, offsets, replica_id=(0, *ranks))
        elif name in axes:
            declared[key] = make_tp_sharded_tensor_for_checkpoint(
                value, key, axes[name], prepend_offsets=sharded_offsets, **groups
            )
        else:
            declared[key] = make_sharded_tensor_for_checkpoint(
                value, key, prepend_offsets=sharded_offsets, **groups
            )
    return declared


def ensure_metadata_has_dp_cp_group(metadata: dict[str, object] | None) -> dict[str, Any]:
    """Return `metadata` with the group of data-parallel replicas added."""
    metadata = {} if metadata is None else metadata
    metadata.setdefault("dp_cp_group", ProcessGroupCollection.current().dp_cp)
    return metadata


def _declarations(sharded_state_dict: Any) -> list[ShardedBase]:
    return [value for _, value in leaves(sharded_state_dict) if isinstance(value, ShardedBase)]


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Rename checkpoint keys in place; each of them must begin with `old_prefix`."""
    for declaration in _declarations(sharded_state_dict):
        if not declaration.key.startswith(old_prefix):
            raise ConfigError(
                f"the checkpoint key {declaration.key!r} does not begin with {old_prefix!r}.",
                rule="replace_prefix_for_sharding renames all keys of its dict",
                fix="use apply_prefix_mapping, which leaves other keys unchanged",
            )
        declaration.key = new_prefix + declaration.key[len(old_prefix) :]


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Add `prefix` to all checkpoint keys, in place."""
    replace_prefix_for_sharding(sharded_state_dict, "", prefix)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """Rename checkpoint keys in place; the first prefix of the map that fits a key is replaced."""
    for declaration in _declarations(sharded_state_dict):
        for old, new in prefix_map.items():
            if declaration.key.startswith(old):
                declaration.key = new + declaration.key[len(old) :]
                break


# Strategies -----------------------------------------------------------------------------


class _Strategy(str):
    """The name of the one format; the subclasses have the names of Megatron's classes."""

    def __new__(cls, *args: Any, **options: Any) -> _Strategy:
        return super().__new__(cls, BACKEND)


class TorchDistSaveShardedStrategy(_Strategy):
    """The strategy of `save`: this framework's format, for any backend.

    `save(..., async_sharded_save=True)` writes in the background.
    """


class TorchDistLoadShardedStrategy(_Strategy):
    """The strategy of `load`, which finds the format of a checkpoint from its files."""


class FullyParallelSaveStrategyWrapper(_Strategy):
    """A strategy of `save`, which always splits writes over replicas (`spread_over_replicas`)."""


class FullyParallelLoadStrategyWrapper(_Strategy):
    """A strategy of `load`, which always splits reads over replicas."""


class AsyncCallsQueue:
    """The saves that are not committed yet; at most one at a time.

    Args:
        persistent: ignored: a thread writes the bytes, not a separate process.
    """

    def __init__(self, persistent: bool = False) -> None:
        self._saves: list[AsyncSave] = []
        self._index = -1

    def schedule_async_request(self, async_request: AsyncSave) -> int:
        """Add a running save, which `save(..., async_sharded_save=True)` returned."""
        self._saves.append(async_request)
        self._index += 1
        return self._index

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Commit saves whose files are written; with `blocking`, wait for all saves. Collective.

        Returns:
            the numbers of the saves that this call committed.
        """
        done = []
        while self._saves:
            if blocking:
                self._saves[0].finish()
            elif not self._saves[0].try_finish():
                break
            self._saves.pop(0)
            done.append(self._index - len(self._saves))
        return done

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of saves that are not committed."""
        return len(self._saves)

    def close(self, abort: bool = False) -> None:
        """Wait for all saves and commit them."""
        self.maybe_finalize_async_calls(blocking=True)


# Files of a save directory --------------------------------------------------------------

isfile: Callable[[str], bool] = os.path.isfile


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """Return the path of the tracker file, which names the newest checkpoint."""
    return os.path.join(checkpoints_path, commit.TRACKER_NAME)


def get_checkpoint_name(
    checkpoints_path: str, iteration: int, release: bool = False, *args: object, **options: object
) -> str:
    """Return the directory of a checkpoint, the same for all ranks."""
    name = commit.iteration_directory(commit.RELEASE if release else iteration)
    return os.path.join(checkpoints_path, name)


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """Return (iteration, whether it is a release) of a tracker file.

    Raises:
        CheckpointError: the file is missing, or does not name a checkpoint.
    """
    directory, name = os.path.split(tracker_filename)
    named = commit.read_tracker(storage_path(directory)) if name == commit.TRACKER_NAME else None
    if named is None:
        raise CheckpointError(
            f"{tracker_filename} names no checkpoint.",
            rule="the file contains the number of an iteration, or the word release",
            flags=["--load"],
            fix="use the --save directory of a run",
        )
    return (0, True) if named == commit.RELEASE else (int(named), False)


COMMON_STATE_FNAME = "common.pt"
"""File of the plain state in a torch_dist checkpoint."""
_results_queue = None
"""Megatron's queue of writer processes; None, because threads write checkpoints."""


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the metadata of a checkpoint without process groups, which cannot be stored."""
    if metadata is None:
        return None
    return {name: each for name, each in metadata.items() if not isinstance(each, Group)}
