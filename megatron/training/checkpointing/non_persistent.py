"""Non-persistent checkpoints for fast restarts; each replaces the previous one.

This module contains the kind "global": all ranks write one checkpoint to a separate directory. In
the kind "local" (`non_persistent_local`), each rank writes to the storage of its node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import run_on_coordinator
from megatron.core.dist_checkpointing.loader import open_contents
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.foundation.errors import ConfigError
from megatron.core.transport.object_collectives import ControlGroup
from megatron.training.checkpointing.non_persistent_local import LocalCheckpoints, LocalSettings
from megatron.training.checkpointing.restore import Restored, Restorer
from megatron.training.config.checkpoint import CheckpointSettings


class GlobalCheckpoints:
    """The single global non-persistent checkpoint of a run, which loads in any layout.

    Methods are collectives; the caller makes all ranks raise the same error.
    """

    def __init__(
        self, directory: StoragePath, layout: Mapping[str, object], peers: ControlGroup
    ) -> None:
        self.directory, self.layout, self.peers = directory, dict(layout), peers

    def save(self, state: ShardedStateDict, iteration: int) -> None:
        """Save a checkpoint, then delete the previous one."""
        final = self.directory / commit.iteration_directory(iteration)
        dist_checkpointing.save(
            state, final, process_group=self.peers, info={"layout": self.layout}
        )
        if self.peers.rank == 0:
            commit.remove_leftovers(self.directory)
            for found in commit.list_checkpoints(self.directory).checkpoints:
                if found.path != final:
                    commit.remove_checkpoint(found, "0")

    def load_newer(self, than: int, restorer: Restorer) -> Restored | None:
        """Load the checkpoint into the run if its iteration is later than `than`."""

        def find() -> StoragePath | None:
            found = commit.list_checkpoints(self.directory).checkpoints[:1]
            newer = (f.path for f in found if isinstance(f.iteration, int) and f.iteration > than)
            return next(newer, None)

        path = run_on_coordinator(self.peers, find, doing="reading", path=self.directory)
        if path is None:
            return None
        return restorer.restore(open_contents(path, peers=self.peers), is_finetuning=False)


NonPersistentCheckpoints = LocalCheckpoints | GlobalCheckpoints


def open_non_persistent(
    settings: CheckpointSettings, layout: Mapping[str, object], peers: ControlGroup
) -> NonPersistentCheckpoints | None:
    """Return the non-persistent checkpoints of the settings. Collective; may make a group."""
    home = settings.save or settings.load or ""
    if settings.non_persistent_ckpt_type == "global":
        directory = settings.non_persistent_global_ckpt_dir or os.path.join(home, "non_persistent")
        return GlobalCheckpoints(storage_path(directory), layout, peers)
    if settings.non_persistent_ckpt_type != "local":
        return None
    if settings.non_persistent_local_ckpt_dir is None:
        raise ConfigError(
            "--non-persistent-ckpt-type local without --non-persistent-local-ckpt-dir.",
            rule="local checkpoints are kept in a directory of each node",
            flags=["--non-persistent-local-ckpt-dir"],
            fix="add --non-persistent-local-ckpt-dir DIRECTORY, or use the type global",
        )
    ranks_of_a_node = os.environ.get("LOCAL_WORLD_SIZE", "1")
    distance = settings.replication_jump or int(ranks_of_a_node)
    local = LocalSettings(
        Path(settings.non_persistent_local_ckpt_dir),
        num_copies=settings.replication_factor - 1 if settings.replication else 0,
        distance=distance,
        belongs_to=os.path.abspath(home),
    )
    return LocalCheckpoints(local, layout, peers)
