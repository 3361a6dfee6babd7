"""One set of ranks that train together, and what a process keeps from one to the next."""

from __future__ import annotations

import torch.distributed as dist

from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.training.inprocess.coordinator import Place
from megatron.training.inprocess.membership import Watch, launcher_store


class Generation:
    """What a run gets from the loop around it."""

    def __init__(self, place: Place, watch: Watch, copies: MemoryCopies) -> None:
        self.place, self.watch, self.copies = place, watch, copies
        self.store = dist.PrefixStore(f"generation/{place.generation}", launcher_store())  # type: ignore[attr-defined]
