"""Which kind of non-persistent checkpoint a run keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.transport.object_collectives import ControlGroup
from megatron.training.checkpointing.non_persistent_global import GlobalCheckpoints
from megatron.training.checkpointing.non_persistent_local import LocalCheckpoints, LocalSettings
from megatron.training.config.checkpoint import CheckpointSettings


def open_non_persistent(
    settings: CheckpointSettings, layout: Mapping[str, Any], peers: ControlGroup
) -> LocalCheckpoints | GlobalCheckpoints | None:
    """Return the checkpoints that the settings ask for: collective, may make a process group."""
    home = settings.save or settings.load or ""
    if settings.non_persistent_ckpt_type == "global":
        directory = settings.non_persistent_global_ckpt_dir or os.path.join(home, "non_persistent")
        return GlobalCheckpoints(storage_path(directory), layout, peers)
    if settings.non_persistent_ckpt_type != "local":
        return None
    assert settings.non_persistent_local_ckpt_dir is not None
    ranks_of_a_node = os.environ.get("LOCAL_WORLD_SIZE", "1")
    distance = settings.replication_jump or int(ranks_of_a_node)
    local = LocalSettings(
        Path(settings.non_persistent_local_ckpt_dir),
        num_copies=settings.replication_factor - 1 if settings.replication else 0,
        distance=distance,
        belongs_to=os.path.abspath(home),
    )
    return LocalCheckpoints(local, layout, peers)
