"""Which kind of short-lived checkpoint a run keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.object_store import place_of
from megatron.core.transport.object_collectives import ControlGroup
from megatron.training.checkpointing.global_tier import GlobalTier
from megatron.training.checkpointing.local_tier import LocalSettings, LocalTier
from megatron.training.config.checkpoint import CheckpointSettings


def make_tier(
    settings: CheckpointSettings, layout: Mapping[str, Any], peers: ControlGroup
) -> LocalTier | GlobalTier | None:
    """Return the tier that the settings ask for: collective, for it may make a process group."""
    home = settings.save or settings.load or ""
    if settings.non_persistent_ckpt_type == "global":
        directory = settings.non_persistent_global_ckpt_dir or os.path.join(home, "non_persistent")
        return GlobalTier(place_of(directory), layout, peers)
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
    return LocalTier(local, layout, peers)
