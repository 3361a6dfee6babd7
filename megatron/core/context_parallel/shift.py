"""Look at later positions of a sequence that is split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.context_parallel.partition import join_zigzag, take_rows
from megatron.core.process_groups_config import Group
from megatron.core.transport import collectives
from megatron.core.utils import get_pg_rank, get_pg_size


def shift_left(x: Tensor, distance: int, cp: Group) -> Tensor:
    """Return at each position what `x` holds `distance` positions later.

    Args:
        x: [b, s/cp], this rank's zigzag part; no gradient.
    Returns:
        [b, s/cp], zeros where the sequence has ended.
    Communication:
        an all-gather on `cp`: for token ids, not for activations.
    """
    size = get_pg_size(cp)
    whole = x
    if size > 1:
        pieces = collectives.all_gather(x.contiguous().unsqueeze(0), cp)
        whole = join_zigzag(pieces, dim=2)
    shifted = torch.zeros_like(whole)
    if distance < whole.shape[1]:
        shifted[:, : whole.shape[1] - distance] = whole[:, distance:]
    return shifted if size == 1 else take_rows(shifted, 1, get_pg_rank(cp), size)
