"""A grid of ranks with named dimensions that creates process groups on demand."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch.distributed as dist

from megatron.core.foundation.errors import TopologyError, refuse_given
from megatron.core.process_groups_config import GroupFactory
from megatron.core.topology.rank_grid import RankGrid


class HyperCommGrid:
    """N-dimensional communication grid, for code that arranges its own axes.

    Args:
        shape: extent of each dimension.
        dim_names: name of each dimension; the first varies fastest.
        rank_offset: first global rank of the grid.
        backend: torch.distributed backend of the groups; the default group's if None.
    Raises:
        TopologyError: names and extents do not match, or the grid exceeds the world.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        self.shape = list(shape)
        self.dim_names = list(dim_names)
        self.rank_offset = rank_offset
        self.backend = backend
        self.size = prod(shape)
        self._grid = RankGrid(tuple(dim_names), tuple(shape), rank_offset)
        self._factory = GroupFactory(backend)
        self._groups: dict[str, Any] = {}
        if dist.is_initialized() and rank_offset + self.size > dist.get_world_size():
            raise TopologyError(
                f"a grid of {self.size} ranks from rank {rank_offset} on exceeds the world of"
                f" {dist.get_world_size()} ranks.",
                rule="rank_offset + product of the shape is at most the world size",
                fix="start more processes or shrink the grid",
            )

    def is_current_rank_in_grid(self) -> bool:
        """Return whether this process is part of the grid."""
        return 0 <= dist.get_rank() - self.rank_offset < self.size

    def get_rank_enum(self, dims: str | Sequence[str]) -> list[list[int]]:
        """Return the rank lists of all groups along `dims`."""
        return self._grid.groups(*self._checked(dims))

    def create_pg(
        self, dims: str | Sequence[str], backend: str | None = None, **options: object
    ) -> Any:
        """Create the groups along `dims` and return this rank's; each may be created once.

        Returns:
            None outside the grid.
        Communication:
            collective on the world, also for ranks outside the grid; see `GroupFactory`.
        """
        given = {"backend": backend not in (None, dist.get_backend()), **options}
        rule = "all groups have the backend and the options of the world"
        refuse_given("create_pg", given, rule=rule, fix="leave these out")
        names = self._checked(dims)
        key = "-".join(names)
        if key in self._groups:
            raise TopologyError(
                f"process group {key!r} was created before.",
                rule="create_pg is called once for each set of dimensions",
                fix=f"use get_pg({dims!r})",
            )
        self._groups[key] = self._factory.create(self._grid.groups(*names), key)
        return self._groups[key]

    def get_pg(self, dims: str | Sequence[str]) -> Any:
        """Return the group along `dims` that `create_pg` made."""
        key = "-".join(self._checked(dims))
        if key not in self._groups:
            raise TopologyError(
                f"process group {key!r} does not exist in this grid.",
                rule="get_pg returns what create_pg made",
                fix=f"call create_pg({dims!r}) on all ranks first",
            )
        return self._groups[key]

    def destroy(self) -> None:
        """Destroy the groups made by this grid."""
        self._factory.destroy()
        self._groups.clear()

    def _checked(self, dims: str | Sequence[str]) -> list[str]:
        names = [dims] if isinstance(dims, str) else list(dims)
        unknown = [name for name in names if name not in self.dim_names]
        if unknown:
            raise TopologyError(
                f"the grid has no dimension {unknown}.", rule=f"its dimensions: {self.dim_names}"
            )
        return [name for name in self.dim_names if name in names]
