"""Deleting old checkpoints, only when a newer one has been read back and verified."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import MegatronError
from megatron.core.transport.object_collectives import ControlGroup, raise_on_all_ranks


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay beside the newest; all of them if neither rule is given."""

    interval: int | None = None
    """Iterations that this divides stay (`--save-retain-interval`)."""
    most_recent: int | None = None
    """So many of the newest stay (`--most-recent-k`)."""

    def __str__(self) -> str:
        """The flags."""
        rules = {"--save-retain-interval": self.interval, "--most-recent-k": self.most_recent}
        return " ".join(f"{flag} {n}" for flag, n in rules.items() if n is not None)

    def checkpoints_to_delete(
        self, directory: StoragePath, newest: int
    ) -> list[commit.FoundCheckpoint]:
        """Return what may go: older than `newest`, kept by no rule, and a checkpoint of ours.

        A directory without a manifest that can be read was not written by a run, or not only.
        """
        if self.interval is None and self.most_recent is None:
            return []
        older = [
            found
            for found in commit.list_checkpoints(directory).checkpoints
            if isinstance(found.iteration, int)
            and found.iteration < newest
            and _has_manifest(found.path)
        ]
        iterations = sorted({int(found.iteration) for found in older}, reverse=True)
        kept = set(iterations[: (self.most_recent or 1) - 1])
        if self.interval is not None:
            kept |= {i for i in iterations if i % self.interval == 0}
        return [found for found in older if found.iteration not in kept]


def _has_manifest(path: StoragePath) -> bool:
    try:
        commit.open_checkpoint(path)
    except (MegatronError, OSError):
        return False
    return True


def apply_retention(
    directory: StoragePath, newest: int, retention: Retention, run: str, *, peers: ControlGroup
) -> list[StoragePath]:
    """Verify checkpoint `newest` from the disk, then delete those that need not be kept.

    Collective: each rank verifies its share of the files. If the newest one is damaged, nothing
    is deleted and every rank raises.

    Returns:
        the directories that were deleted (on the coordinator).
    """
    doomed: list[commit.FoundCheckpoint] | None = None
    if peers.rank == 0:
        doomed = retention.checkpoints_to_delete(directory, newest)
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
    raise_on_all_ranks(problem, peers)
    deleted: list[StoragePath] = []
    if peers.rank == 0:
        try:
            for found in doomed:
                commit.remove_checkpoint(found, run)
                deleted.append(found.path)
        except OSError as error:
            problem = describe_os_error(error, path=str(found.path), doing="deleting")
    raise_on_all_ranks(problem, peers)
    return deleted
