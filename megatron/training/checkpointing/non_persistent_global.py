"""Non-persistent checkpoints of all ranks together, in a directory of their own: one is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import run_collectively
from megatron.core.dist_checkpointing.loader import Contents, open_contents
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.transport.object_collectives import ControlGroup


class GlobalCheckpoints:
    """The one non-persistent checkpoint of a run; loads in any layout. Methods are collectives."""

    def __init__(
        self, directory: StoragePath, layout: Mapping[str, Any], peers: ControlGroup
    ) -> None:
        self.directory, self.layout, self.peers = directory, dict(layout), peers

    def save(self, state: ShardedStateDict, iteration: int) -> None:
        """Save, then delete what was saved before."""
        final = self.directory / commit.iteration_directory(iteration)
        dist_checkpointing.save(
            state, final, process_group=self.peers, info={"layout": self.layout}
        )

        def delete_others() -> None:
            if self.peers.rank == 0:
                commit.remove_leftovers(self.directory)
                for found in commit.list_checkpoints(self.directory).checkpoints:
                    if found.path != final:
                        commit.remove_checkpoint(found, "0")

        run_collectively(self.peers, "deleting non-persistent checkpoints", delete_others)

    def newest(self) -> int | None:
        """Return the iteration that is there."""

        def look() -> int | None:
            found = commit.list_checkpoints(self.directory).checkpoints
            return int(found[0].iteration) if found and found[0].iteration != "release" else None

        mine = run_collectively(self.peers, "looking for non-persistent checkpoints", look)
        newest: int | None = self.peers.broadcast(mine)
        return newest

    def open(self, iteration: int) -> Contents:
        """Open it on all ranks."""
        path = self.directory / commit.iteration_directory(iteration)
        return open_contents(path, peers=self.peers)
