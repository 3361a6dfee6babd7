"""Places on axes without processes: for tests of arithmetic and of the shapes of layers."""

from dataclasses import dataclass
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SingleRank


@dataclass(frozen=True)
class FakeGroup(SingleRank):
    """A position on an axis of any size."""

    group_rank: int
    group_size: int

    def rank(self) -> int:
        """Return this rank's position in the group."""
        return self.group_rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self.group_size


def fake_groups(**places: tuple[int, int]) -> ProcessGroupCollection:
    """Build a collection without processes: fake_groups(tp=(rank, size), pp=(0, 2))."""
    groups: dict[str, Any] = {axis: FakeGroup(*place) for axis, place in places.items()}
    return ProcessGroupCollection(**groups)
