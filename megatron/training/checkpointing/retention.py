"""Delete old checkpoints, after a newer one is verified from the disk."""

from __future__ import annotations

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import (
    print_once,
    run_collectively,
    run_on_coordinator,
)
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import MegatronError
from megatron.core.transport.object_collectives import ControlGroup
from megatron.training.config.checkpoint import CheckpointSettings


def apply_retention(
    directory: StoragePath,
    newest: int,
    settings: CheckpointSettings,
    run: str,
    *,
    peers: ControlGroup,
) -> None:
    """Verify checkpoint `newest` from the disk, then delete older checkpoints by the rules.

    Collective: each rank verifies a share of the files. If the newest checkpoint is damaged,
    nothing is deleted and every rank raises.
    """
    doomed = _checkpoints_to_delete(directory, newest, settings) if peers.rank == 0 else None
    doomed = peers.broadcast(doomed)
    if not doomed:
        return
    path = directory / commit.iteration_directory(newest)

    def verify() -> None:
        names = sorted(commit.open_checkpoint(path).files)[peers.rank :: peers.size]
        if problems := verify_checkpoint(path, names=names).problems:
            raise problems[0]

    run_collectively(peers, f"verifying {path}", verify)
    rules = {
        "--save-retain-interval": settings.save_retain_interval,
        "--most-recent-k": settings.most_recent_k,
    }
    why = " ".join(f"{flag} {n}" for flag, n in rules.items() if n is not None)
    for found in doomed:
        run_on_coordinator(
            peers,
            lambda found=found: commit.remove_checkpoint(found, run),
            doing="deleting",
            path=found.path,
        )
        print_once(peers, f"  deleted {found.path} ({why})")


def _checkpoints_to_delete(
    directory: StoragePath, newest: int, settings: CheckpointSettings
) -> list[commit.FoundCheckpoint]:
    """Return the checkpoints that are older than `newest` and kept by no rule.

    Directories without a readable manifest are never deleted.
    """
    interval, most_recent = settings.save_retain_interval, settings.most_recent_k
    if interval is None and most_recent is None:
        return []
    older = [
        found
        for found in commit.list_checkpoints(directory).checkpoints
        if isinstance(found.iteration, int)
        and found.iteration < newest
        and _has_manifest(found.path)
    ]
    iterations = sorted({int(found.iteration) for found in older}, reverse=True)
    kept = set(iterations[: (most_recent or 1) - 1])
    if interval is not None:
        kept |= {i for i in iterations if i % interval == 0}
    return [found for found in older if found.iteration not in kept]


def _has_manifest(path: StoragePath) -> bool:
    try:
        commit.open_checkpoint(path)
    except (MegatronError, OSError):
        return False
    return True
