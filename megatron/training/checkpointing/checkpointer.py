"""Save and load a run: what the loop and Megatron's functions both stand on.

Every method is a collective over all processes of the run.
"""

from __future__ import annotations

import secrets
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.agreement import Peers, agree, peers_of
from megatron.core.dist_checkpointing import AsyncSave, commit
from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    describe_os_error,
)
from megatron.core.dist_checkpointing.exchange import together
from megatron.core.dist_checkpointing.lease import Lease
from megatron.core.dist_checkpointing.loader import Contents, load_state, open_contents
from megatron.core.dist_checkpointing.retention import apply_retention
from megatron.core.dist_checkpointing.validation import parse_strict_handling
from megatron.core.errors import CheckpointError, MegatronError
from megatron.training.checkpointing.precision import most_precise_source
from megatron.training.checkpointing.run_state import (
    RunParts,
    apply_model,
    apply_optimizer,
    apply_rng,
    declare_run,
    describe_layout,
    plain_run_state,
    progress_of,
    show_layout,
)
from megatron.training.checkpointing.selection import (
    Selection,
    missing,
    missing_pretrained,
    no_intact_checkpoint,
    select_checkpoints,
)
from megatron.training.checkpointing.settings import CheckpointSettings
from megatron.training.state import TrainState

_RUN = secrets.token_hex(6)


@dataclass
class Restored:
    """What a checkpoint gave back, besides what it put into the parts."""

    path: Path
    progress: TrainState
    args: Mapping[str, Any]
    """Settings of the run that saved it."""
    extra: dict[str, Any]
    """What was passed to `save` as extra."""
    layout: Mapping[str, Any] = field(default_factory=dict)


class Checkpointer:
    """Saves and loads the parts of one run."""

    def __init__(
        self, settings: CheckpointSettings, parts: RunParts, *, process_group: Any = None
    ) -> None:
        self.settings = settings
        self.parts = parts
        self.peers: Peers = peers_of(process_group)
        self._lease: Lease | None = None
        # Known on every rank, unlike the lease, which the coordinator holds alone.
        self._has_claimed = False
        self._in_flight: AsyncSave | None = None
        self.last_committed: int | None = None
        """Iteration of the newest checkpoint of this run that is on the disk, complete."""

    # Saving ---------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take the lease of the save directory and sweep up what dead runs left there.

        Call it before training, so that a second run in the same directory ends at once.

        Raises:
            CheckpointError: another run holds the directory, or it cannot be written.
        """
        if self.settings.save is None or self._has_claimed:
            return
        problem: MegatronError | None = None
        directory = Path(self.settings.save)
        if self.peers.rank == 0:
            try:
                self._lease = Lease.acquire(directory)
                for path in commit.remove_leftovers(directory):
                    self._say(f"removed {path}: left by an interrupted save or deletion")
            except OSError as error:
                problem = describe_os_error(error, path=directory, doing="preparing")
            except MegatronError as error:
                problem = error
        agree(problem, self.peers)
        self._has_claimed = True

    def save(self, progress: TrainState, *, extra: Mapping[str, Any] | None = None) -> None:
        """Save the run at `progress.iteration`; returns after the commit, or with `--async-save`
        as soon as the state is copied.

        Args:
            extra: more plain values to keep, given back in `Restored.extra`.
        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        assert self.settings.save is not None, "save() without --save"
        self.finish()
        self.claim()
        with_optimizer = not self.settings.no_save_optim
        with_rng = not self.settings.no_save_rng

        def declare() -> dict[str, Any]:
            flags = {"with_optimizer": with_optimizer, "with_rng": with_rng}
            plain = plain_run_state(self.parts, progress, **flags)
            return declare_run(self.parts, **flags) | plain | {"extra": dict(extra or {})}

        state = together(self.peers, "declaring the state to save", declare)
        directory = Path(self.settings.save)
        iteration = progress.iteration
        saving = dist_checkpointing.save(
            state,
            directory / commit.iteration_directory(iteration),
            async_sharded_save=self.settings.async_save,
            process_group=self.peers,
            info={"layout": describe_layout(self.parts)},
            spread_over_replicas=self.settings.ckpt_fully_parallel_save,
        )
        if saving is None:
            self._after_commit(directory, iteration)
        else:
            saving.add_finalize_fn(lambda: self._after_commit(directory, iteration))
            self._in_flight = saving

    @property
    def has_save_in_flight(self) -> bool:
        """Whether an asynchronous save is not committed yet."""
        return self._in_flight is not None

    def after_step(self) -> None:
        """Commit an asynchronous save whose bytes are on the disk; its error is raised here."""
        if self._in_flight is not None:
            try:
                is_finished = self._in_flight.try_finish()
            except MegatronError:
                self._in_flight = None
                raise
            if is_finished:
                self._in_flight = None

    def finish(self) -> None:
        """Wait for an asynchronous save and commit it: before the next save and at the end."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.finish()

    def close(self) -> None:
        """Finish, and give the save directory free."""
        self.finish()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._has_claimed = False

    def _after_commit(self, directory: Path, iteration: int) -> None:
        """The checkpoint exists: point the tracker at it, then let old ones go."""
        self.last_committed = iteration
        problem: MegatronError | None = None
        if self.peers.rank == 0:
            try:
                commit.write_tracker(directory, iteration)
            except OSError as error:
                problem = describe_os_error(
                    error, path=directory / commit.TRACKER_NAME, doing="writing"
                )
        agree(problem, self.peers)
        self._say(f"  successfully saved checkpoint from iteration {iteration:7d} to {directory}")
        interval = self.settings.save_retain_interval
        if interval is not None:
            for path in apply_retention(directory, iteration, interval, _RUN, peers=self.peers):
                self._say(f"  deleted {path} (--save-retain-interval {interval})")

    # Loading --------------------------------------------------------------------------------

    def load(self) -> Restored | None:
        """Load the newest intact checkpoint of `--load`, or weights of `--pretrained-checkpoint`.

        Returns:
            what was restored; None if there is nothing to load, which only an empty or absent
            `--load` directory leads to, or the run's own before its first save.
        Raises:
            CheckpointError: on every rank, if what is there cannot be used.
        """
        settings = self.settings
        if settings.load is not None:
            restored = self._load_from(
                Path(settings.load), settings.ckpt_step, is_finetuning=settings.finetune
            )
            if restored is not None:
                return restored
        if settings.pretrained_checkpoint is not None:
            restored = self._load_from(
                Path(settings.pretrained_checkpoint), None, is_finetuning=True
            )
            if restored is None:
                raise missing_pretrained(settings.pretrained_checkpoint)
            return restored
        if settings.load is not None:
            if settings.exit_on_missing_checkpoint:
                raise missing(settings.load)
            self._say(
                f"WARNING: {settings.load} holds no checkpoint yet: starting from random weights"
                " (--exit-on-missing-checkpoint makes this an error)"
            )
        return None

    def _load_from(
        self, directory: Path, ckpt_step: int | None, *, is_finetuning: bool
    ) -> Restored | None:
        selection = self._select(directory, ckpt_step)
        for note in selection.notes:
            self._say(note)
        problems: list[CheckpointError] = []
        for found in selection.candidates:
            try:
                contents = open_contents(found.path, peers=self.peers)
                restored = self._load_contents(contents, is_finetuning=is_finetuning)
            except DamagedCheckpointError as error:
                # Raised by all ranks alike, so all go on to the same next candidate.
                self._say(f"{found.path} cannot be used:\n{error}")
                problems.append(error)
                continue
            what = "weights" if is_finetuning else "checkpoint"
            why = " (newer ones are damaged)" if problems else ""
            self._say(
                f"  successfully loaded {what} from {found.path} at iteration "
                f"{contents.common_state().get('iteration', 0)}{why}"
            )
            return restored
        if problems:
            raise no_intact_checkpoint(directory, problems)
        return None

    def _select(self, directory: Path, ckpt_step: int | None) -> Selection:
        """Decide on the coordinator, for all."""
        selection, problem = Selection(), None
        if self.peers.rank == 0:
            try:
                selection = select_checkpoints(directory, ckpt_step, save=self.settings.save)
            except OSError as error:
                problem = describe_os_error(error, path=directory, doing="reading")
            except CheckpointError as error:
                problem = error
        agree(problem, self.peers)
        chosen: Selection = self.peers.broadcast(selection)
        return chosen

    def _load_contents(self, contents: Contents, *, is_finetuning: bool) -> Restored:
        settings, parts = self.settings, self.parts
        with_optimizer = not (is_finetuning or settings.no_load_optim)
        with_rng = not (is_finetuning or settings.no_load_rng)
        template = together(
            self.peers,
            "declaring the state to load",
            lambda: declare_run(
                parts, with_optimizer=with_optimizer, with_rng=with_rng, is_loading=True
            ),
        )
        generators = template.get("generators")
        if generators is not None and generators.unique_key not in contents.objects:
            del template["generators"]  # another grid of ranks; nothing of ours depends on it
        loaded = load_state(
            template,
            contents,
            peers=self.peers,
            strict=parse_strict_handling(settings.dist_ckpt_strictness),
            source_of=most_precise_source,
        )

        def take_over() -> TrainState:
            apply_model(parts, loaded.state, strict=not loaded.unexpected)
            apply_optimizer(parts, loaded.state, was_loaded=with_optimizer)
            if with_rng:
                apply_rng(loaded.state)
            return TrainState() if is_finetuning else progress_of(loaded.state)

        doing = f"taking over the state of {contents.directory}"
        progress = together(self.peers, doing, take_over)
        layout = contents.manifest.info.get("layout")
        layout = layout if isinstance(layout, dict) else {}
        before, now = show_layout(layout), show_layout(describe_layout(parts))
        if before != now:
            self._say(f"  layout of the checkpoint: {before}; of this run: {now}")
        args, extra = loaded.state.get("args"), loaded.state.get("extra")
        return Restored(
            contents.directory,
            progress,
            vars(args) if isinstance(args, Namespace) else {},
            extra if isinstance(extra, dict) and not is_finetuning else {},
            layout,
        )

    def _say(self, text: str) -> None:
        if self.peers.rank == 0:
            print(text, flush=True)
