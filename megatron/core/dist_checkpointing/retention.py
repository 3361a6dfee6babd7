"""Deleting old checkpoints, only when a newer one has been read back and verified."""

from __future__ import annotations

from megatron.core.agreement import Peers, agree
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import Place
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.errors import MegatronError


def checkpoints_to_delete(
    directory: Place, newest: int, retain_interval: int
) -> list[commit.Found]:
    """Return what `--save-retain-interval` lets go: older than `newest`, and not a multiple."""
    return [
        found
        for found in commit.list_checkpoints(directory).checkpoints
        if isinstance(found.iteration, int)
        and found.iteration < newest
        and found.iteration % retain_interval
    ]


def apply_retention(
    directory: Place, newest: int, retain_interval: int, run: str, *, peers: Peers
) -> list[Place]:
    """Verify checkpoint `newest` from the disk, then delete those that need not be kept.

    Collective: each rank verifies its share of the files. If the newest one is damaged, nothing
    is deleted and every rank raises.

    Returns:
        the directories that were deleted (on the coordinator).
    """
    doomed: list[commit.Found] | None = None
    if peers.rank == 0:
        doomed = checkpoints_to_delete(directory, newest, retain_interval)
    doomed = peers.broadcast(doomed)
    if not doomed:
        return []
    path = directory / commit.iteration_directory(newest)
    problem: MegatronError | None = None
    try:
        names = sorted(commit.open_checkpoint(path).files)[peers.rank :: peers.size]
        problems = verify_checkpoint(path, names=names).problems
        problem = problems[0] if problems else None
    except MegatronError as error:
        problem = error
    agree(problem, peers)
    deleted: list[Place] = []
    if peers.rank == 0:
        try:
            for found in doomed:
                commit.remove_checkpoint(found, run)
                deleted.append(found.path)
        except OSError as error:
            problem = describe_os_error(error, path=str(found.path), doing="deleting")
    agree(problem, peers)
    return deleted
