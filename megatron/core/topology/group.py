"""The ranks of one axis: a process group, or `SINGLE_RANK` if the axis does not exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class SingleRank:
    """The group of an axis that does not exist: this rank alone, without communication."""

    def rank(self) -> int:
        """Return this rank's position in the group."""
        return 0

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return 1


SINGLE_RANK = SingleRank()
Group = dist.ProcessGroup | SingleRank

_KEPT: WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = WeakKeyDictionary()


def keep_for_group(
    group: dist.ProcessGroup, name: str, make: Callable[[dist.ProcessGroup], T]
) -> T:
    """Return `make(group)`, computed at the first call and cached as long as the group exists.

    For connections of the ranks of a group, which are expensive to make.

    Args:
        name: key of this cached object among the objects cached for the group.
    """
    kept = _KEPT.get(group)
    if kept is None:
        kept = _KEPT[group] = {}
    if name not in kept:
        kept[name] = make(group)
    found: T = kept[name]
    return found
