"""Print on one rank."""

from __future__ import annotations

import torch.distributed as dist

from megatron.training.launch import rank_info


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    info = rank_info.read_rank_info()
    return info.rank, info.world_size


def is_rank_0() -> bool:
    """Return whether this is global rank 0; works before torch.distributed is initialized."""
    return _rank_and_size()[0] == 0


def is_last_rank() -> bool:
    """Return whether this is the highest global rank.

    In every rank order it is on the last stage of the last replica, which computes the loss.
    """
    rank, size = _rank_and_size()
    return rank == size - 1


def print_rank_0(message: object) -> None:
    """Print on global rank 0."""
    if is_rank_0():
        print(message, flush=True)


def print_rank_last(message: object) -> None:
    """Print on the highest global rank, which computes the loss."""
    if is_last_rank():
        print(message, flush=True)
