"""The ranks of one axis: a process group, or `SINGLE_RANK` where the axis does not exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class SingleRank:
    """The group of an axis that does not exist: this rank alone, with nobody to talk to."""

    def rank(self) -> int:
        """Return this rank's position in the group."""
        return 0

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return 1


SINGLE_RANK = SingleRank()
Group = dist.ProcessGroup | SingleRank
