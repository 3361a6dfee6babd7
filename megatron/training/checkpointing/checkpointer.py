"""Save and load a run, for the training loop and for Megatron's functions.

Every method is a collective over all processes of the run: if one process fails, all raise its
error.
"""

from __future__ import annotations

import functools
import secrets
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import async_save, commit
from megatron.core.dist_checkpointing.collective import (
    AgreeingGroup,
    print_once,
    run_collectively,
    run_on_coordinator,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError, MegatronError
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    ControlGroup,
    control_group,
    raise_on_all_ranks,
)
from megatron.training.checkpointing.hugging_face import (
    write_adapters_collectively,
    write_collectively,
)
from megatron.training.checkpointing.memory import MemoryCheckpoints
from megatron.training.checkpointing.non_persistent import (
    NonPersistentCheckpoints,
    open_non_persistent,
)
from megatron.training.checkpointing.restore import Restored
from megatron.training.checkpointing.resume_source import ResumeSource
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
"""Part of the name of a checkpoint that this process deletes."""

P = ParamSpec("P")
Result = TypeVar("Result")
Method = Callable[Concatenate["Checkpointer", P], Result]


def _collective(doing: str) -> Callable[[Method[P, Result]], Method[P, Result]]:
    """Make a method raise on all ranks if it raises on one; see `AgreeingGroup.run`."""

    def decorate(method: Method[P, Result]) -> Method[P, Result]:
        @functools.wraps(method)
        def call(self: Checkpointer, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            return self.peers.run(doing, lambda: method(self, *args, **kwargs))

        return call

    return decorate


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


class Checkpointer:
    """Saves and loads the parts of one run."""

    def __init__(
        self,
        settings: CheckpointSettings,
        context: CheckpointContext,
        *,
        process_group: Group | ControlGroup | None = None,
        memory: tuple[MemoryCopies, int] | None = None,
    ) -> None:
        """
        Args:
            memory: (copies of the state in this process, number of its node).
        """
        self.settings = settings
        self.context = context
        self.peers = AgreeingGroup(
            control_group(torch_collectives.world() if process_group is None else process_group)
        )
        self.non_persistent = open_non_persistent(settings, describe_layout(context), self.peers)
        self.memory = (
            None
            if memory is None
            else MemoryCheckpoints(memory[0], settings, context, self.peers, memory[1])
        )
        self.last_committed: int | None = None
        """Iteration of this run's newest complete checkpoint."""
        self._lock: SaveLock | None = None
        self._has_claimed = False  # on every rank; only the coordinator has the lock
        self._has_non_persistent = False

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

    @_collective("claiming the save directory")
    def claim(self) -> None:
        """Lock the save directory and delete the unfinished files of interrupted runs.

        Call it before training, so that a second run in the same directory fails at once.

        Raises:
            CheckpointError: another run has locked the directory, or it is not writable.
        """
        if self.settings.save is not None and not self._has_claimed:
            self._lock = claim_directory(self.directory, self.peers)
            self._has_claimed = True

    @_collective("saving a checkpoint")
    def save(self, train_state: TrainState, *, extra: Mapping[str, object] | None = None) -> None:
        """Save the run at `train_state.iteration`. Returns after the commit, or with `--async-save`
        after the state is copied.

        Args:
            extra: additional plain values, returned in `Restored.extra` after a load.
        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        directory, iteration = self.directory, train_state.iteration
        self.finish()
        self.claim()
        raise_on_all_ranks(moved_away(directory) if self._lock else None, self.peers)
        saving = dist_checkpointing.save(
            self._declare(train_state, extra),
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
        apply_retention(directory, iteration, self.settings, peers=self.peers)

    def _declare(
        self, train_state: TrainState, extra: Mapping[str, object] | None
    ) -> ShardedStateDict:
        """Return the state dict of the run, `extra` included."""
        flags = {
            "with_optimizer": not self.settings.no_save_optim,
            "with_rng": not self.settings.no_save_rng,
        }
        plain = plain_run_state(self.context, train_state, **flags)
        return declare_run(self.context, **flags) | plain | {"extra": dict(extra or {})}

    @_collective("saving a non-persistent checkpoint")
    def save_non_persistent(
        self, train_state: TrainState, *, extra: Mapping[str, object] | None = None
    ) -> None:
        """Replace the non-persistent checkpoint, which serves fast restarts.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        if self.non_persistent is None:
            raise CheckpointError(
                "--non-persistent-ckpt-type is not given.",
                flags=["--non-persistent-ckpt-type"],
                fix="choose global or local, or save a persistent checkpoint",
            )
        iteration = train_state.iteration
        self.non_persistent.save(self._declare(train_state, extra), iteration)
        self._has_non_persistent = True
        print_once(self.peers, f"  saved a non-persistent checkpoint from iteration {iteration:7d}")

    @property
    def has_save_in_flight(self) -> bool:
        """Whether an asynchronous save is not committed yet."""
        return async_save.in_flight() is not None

    def after_step(self) -> None:
        """Commit an asynchronous save if all bytes are written, or raise its error."""
        # On all ranks or none: other steps have no collective.
        if (saving := async_save.in_flight()) is not None:
            self.peers.run("committing a checkpoint", saving.try_finish)

    def finish(self) -> None:
        """Wait for an asynchronous save and commit it."""
        if (saving := async_save.in_flight()) is not None:
            self.peers.run("committing a checkpoint", saving.finish)

    def close(self) -> None:
        """Finish, and unlock the save directory."""
        self.finish()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._has_claimed = False

    @_collective("loading a checkpoint")
    def load(self) -> Restored | None:
        """Load the newest intact checkpoint of `--load`, or the weights of `--load-hf` or
        `--pretrained-checkpoint`; see `ResumeSource.load`."""
        return self._source(self.non_persistent).load()

    @_collective("loading a checkpoint")
    def load_newest(self, not_after: int) -> Restored | None:
        """Load the newest state that this run has saved or begun with into the running parts.

        Args:
            not_after: the current iteration of the run.
        Returns:
            None if there is no saved state.
        """
        self.finish()
        begins_with_newest = self.settings.load is not None and self.settings.ckpt_step is None
        is_own = self._has_non_persistent or begins_with_newest
        source = self._source(self.non_persistent if is_own else None)
        return source.load_newest(not_after, last_saved=self.last_committed)

    def _source(self, non_persistent: NonPersistentCheckpoints | None) -> ResumeSource:
        return ResumeSource(self.settings, self.context, self.peers, non_persistent, self.memory)

    def _newest(self) -> StoragePath:
        """Return the newest checkpoint of this run, after committing an asynchronous save."""
        self.finish()
        return self.directory / commit.iteration_directory(self.last_committed or 0)

    @_collective("writing a model")
    def export_model(self, directory: Path) -> None:
        """Write the newest checkpoint of this run as a Hugging Face model.

        The run's tokenizer is written as well. With `--load-hf` and no other tokenizer for text,
        the tokenizer files of the loaded model are copied.
        """
        began_with = self.settings.load_hf
        args = self.context.args
        kind, model = args.get("tokenizer_type"), args.get("tokenizer_model")
        is_own = kind is not None and (
            began_with is None or (kind != "NullTokenizer" and model != began_with)
        )
        written = write_collectively(
            self._newest(),
            directory,
            companion=None if began_with is None else Path(began_with),
            make_tokenizer=(lambda: build_tokenizer(Namespace(**args))) if is_own else None,
            has_adapters=self.context.weights == "adapters",
            dtype=self.settings.save_hf_dtype,
            peers=self.peers,
        )
        print_once(
            self.peers,
            f"  successfully wrote a {written.family} model in {written.dtype} to {directory}"
            + ("" if written.note is None else f"; {written.note}"),
        )

    @_collective("writing adapters")
    def export_adapters(self, directory: Path) -> None:
        """Write the adapters of this run's newest checkpoint as a PEFT directory."""
        write_adapters_collectively(
            self._newest(), directory, base=self.settings.load_hf, peers=self.peers
        )
        print_once(self.peers, f"  successfully wrote the adapters to {directory}")


def apply_retention(
    directory: StoragePath,
    newest: int,
    settings: CheckpointSettings,
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
            functools.partial(commit.remove_checkpoint, found, _RUN),
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
