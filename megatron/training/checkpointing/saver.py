"""Save a run: lock of the directory, asynchronous saves, tracker file, retention.

An old checkpoint is deleted only after a newer one is verified from the disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import async_save, commit
from megatron.core.dist_checkpointing.collective import print_once, run_on_coordinator
from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError, MegatronError
from megatron.core.transport.object_collectives import ControlGroup, raise_on_all_ranks
from megatron.training.checkpointing.run_state import (
    CheckpointContext,
    declare_run,
    describe_layout,
    plain_run_state,
)
from megatron.training.checkpointing.selection import moved_away
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.run.state import TrainState

_RUN = secrets.token_hex(6)


def claim_directory(directory: StoragePath, peers: ControlGroup) -> SaveLock | None:
    """Lock a save directory and delete unfinished files of interrupted runs. Collective.

    Returns:
        on the coordinator, the lock of a local directory. A second call in the same process returns
        the same lock.
    Raises:
        CheckpointError: another run has locked the directory, or it is not writable; on all ranks.
    """
    lock: SaveLock | None = None

    def claim() -> None:
        nonlocal lock
        if isinstance(directory, Path):
            lock = SaveLock.acquire(directory)
        for path in commit.remove_leftovers(directory):
            print(f"removed {path}: left by an interrupted save or deletion", flush=True)

    run_on_coordinator(peers, claim, doing="preparing", path=directory)
    return lock


class Saver:
    """Saves the parts of one run into `settings.save`. Every method is a collective."""

    def __init__(
        self, settings: CheckpointSettings, context: CheckpointContext, peers: ControlGroup
    ) -> None:
        self.settings, self.context, self.peers = settings, context, peers
        self.last_committed: int | None = None
        """Iteration of this run's newest complete checkpoint."""
        self._lock: SaveLock | None = None
        # Set on every rank; only the coordinator has the lock.
        self._has_claimed = False

    @property
    def directory(self) -> StoragePath:
        """The save directory."""
        if self.settings.save is None:
            raise CheckpointError(
                "--save is not given.",
                flags=["--save"],
                fix="give --save DIRECTORY, or do not save",
            )
        return storage_path(self.settings.save)

    def newest(self) -> StoragePath:
        """Return the newest checkpoint of this run, after committing an asynchronous save."""
        self.finish()
        return self.directory / commit.iteration_directory(self.last_committed or 0)

    def claim(self) -> None:
        """Lock the save directory, once; see `claim_directory`."""
        if self.settings.save is not None and not self._has_claimed:
            self._lock = claim_directory(self.directory, self.peers)
            self._has_claimed = True

    def declare(
        self, train_state: TrainState, extra: Mapping[str, object] | None
    ) -> ShardedStateDict:
        """Return the state dict of the run, `extra` included."""
        flags = {
            "with_optimizer": not self.settings.no_save_optim,
            "with_rng": not self.settings.no_save_rng,
        }

        plain = plain_run_state(self.context, train_state, **flags)
        return declare_run(self.context, **flags) | plain | {"extra": dict(extra or {})}

    def save(self, train_state: TrainState, extra: Mapping[str, object] | None = None) -> None:
        """Save the run at `train_state.iteration`; see `Checkpointer.save`."""
        directory, iteration = self.directory, train_state.iteration
        self.finish()
        self.claim()
        raise_on_all_ranks(moved_away(directory) if self._lock else None, self.peers)
        saving = dist_checkpointing.save(
            self.declare(train_state, extra),
            directory / commit.iteration_directory(iteration),
            async_sharded_save=self.settings.async_save,
            process_group=self.peers,
            info={"layout": describe_layout(self.context)},
            spread_over_replicas=self.settings.ckpt_fully_parallel_save,
        )
        if saving is None:
            self._after_commit(directory, iteration)
        else:
            saving.add_finalize_fn(lambda: self._after_commit(directory, iteration))

    def after_step(self) -> None:
        """Commit an asynchronous save if all bytes are written, or raise its error."""
        if (saving := async_save.in_flight()) is not None:
            saving.try_finish()

    def finish(self) -> None:
        """Wait for an asynchronous save and commit it."""
        if (saving := async_save.in_flight()) is not None:
            saving.finish()

    def close(self) -> None:
        """Commit an asynchronous save, and unlock the save directory."""
        self.finish()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._has_claimed = False

    def _after_commit(self, directory: StoragePath, iteration: int) -> None:
        """Write the iteration to the tracker file, then delete old checkpoints."""
        self.last_committed = iteration
        run_on_coordinator(
            self.peers,
            lambda: commit.write_tracker(directory, iteration),
            doing="writing",
            path=directory / commit.TRACKER_NAME,
            needed_bytes=len(str(iteration)),
        )
        print_once(
            self.peers,
            f"  successfully saved checkpoint from iteration {iteration:7d} to {directory}",
        )
        retention = Retention(self.settings.save_retain_interval, self.settings.most_recent_k)
        for path in apply_retention(directory, iteration, retention, _RUN, peers=self.peers):
            print_once(self.peers, f"  deleted {path} ({retention})")


@dataclass(frozen=True)
class Retention:
    """Rules for the checkpoints to keep in addition to the newest; without rules, keep all."""

    interval: int | None = None
    """Keep iterations that are a multiple of this (`--save-retain-interval`)."""
    most_recent: int | None = None
    """Keep this many of the newest checkpoints (`--most-recent-k`)."""

    def __str__(self) -> str:
        rules = {"--save-retain-interval": self.interval, "--most-recent-k": self.most_recent}
        return " ".join(f"{flag} {n}" for flag, n in rules.items() if n is not None)

    def checkpoints_to_delete(
        self, directory: StoragePath, newest: int
    ) -> list[commit.FoundCheckpoint]:
        """Return the checkpoints that are older than `newest` and kept by no rule.

        Directories without a readable manifest are never deleted.
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
    """Verify checkpoint `newest` from the disk, then delete older checkpoints by the rules.

    Collective: each rank verifies a share of the files. If the newest checkpoint is damaged,
    nothing is deleted and every rank raises.

    Returns:
        the deleted directories (on the coordinator).
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
