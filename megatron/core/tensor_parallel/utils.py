"""Splitting tensors over tensor-parallel ranks: Megatron's names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.process_groups_config import resolve_group
from megatron.core.topology.group import Group
from megatron.core.transport import collectives
from megatron.core.utils import divide


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Cut [..., h] into equal parts [..., h/p], as views or as contiguous copies."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: Group | None = None
) -> Tensor:
    """Return this rank's equal piece [n/tp] of the flattened tensor.

    Args:
        new_buffer: copy the piece, so that the full tensor can be freed.
    """
    group = resolve_group(tp_group, "tp")
    length = divide(tensor.numel(), group.size())
    piece = tensor.reshape(-1).narrow(0, group.rank() * length, length)
    return piece.clone() if new_buffer else piece


def gather_split_1d_tensor(tensor: Tensor, tp_group: Group | None = None) -> Tensor:
    """Join the pieces [n/tp] of all ranks to [n]: one all-gather."""
    group = resolve_group(tp_group, "tp")
    return tensor if group.size() == 1 else collectives.all_gather(tensor, group)


class VocabUtility:
    """The ids that a rank owns: equal, consecutive ranges in rank order."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """Return (first, end) of the ids of `rank`."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """Return (first, end) of the ids of `rank`."""
        size = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)
