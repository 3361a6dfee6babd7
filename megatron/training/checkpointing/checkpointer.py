"""Save and load a run: what the loop and Megatron's functions both stand on.

Every method is a collective over all processes of the run.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import AsyncSave, commit
from megatron.core.dist_checkpointing.collective import run_collectively
from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    describe_os_error,
)
from megatron.core.dist_checkpointing.interop.contents import InteropContents
from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.loader import Contents, Loaded, load_state
from megatron.core.dist_checkpointing.local_state import as_local_state
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.dist_checkpointing.retention import Retention, apply_retention
from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.dist_checkpointing.validation import parse_strict_handling
from megatron.core.errors import CheckpointError, MegatronError
from megatron.core.transport.object_collectives import (
    ControlGroup,
    SingleProcess,
    control_group,
    raise_on_all_ranks,
)
from megatron.training.checkpointing.claim import claim_directory
from megatron.training.checkpointing.hugging_face import (
    load_adapters_collectively,
    note_on_precision,
    open_collectively,
    write_adapters_collectively,
    write_collectively,
)
from megatron.training.checkpointing.interop_state import (
    check_interop,
    complete_interop_state,
)
from megatron.training.checkpointing.key_mapping import compare_heads, stored_key
from megatron.training.checkpointing.non_persistent import open_non_persistent
from megatron.training.checkpointing.non_persistent_global import GlobalCheckpoints
from megatron.training.checkpointing.non_persistent_local import LocalCheckpoints
from megatron.training.checkpointing.restored import Restored, take_over
from megatron.training.checkpointing.run_state import (
    RunParts,
    declare_run,
    describe_layout,
    plain_run_state,
    show_layout,
)
from megatron.training.checkpointing.selection import (
    Selection,
    missing,
    missing_pretrained,
    moved_away,
    no_intact_checkpoint,
    select_checkpoints,
)
from megatron.training.checkpointing.upcycling import is_dense, read_from_dense
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.state import TrainState

_RUN = secrets.token_hex(6)


class Checkpointer:
    """Saves and loads the parts of one run."""

    def __init__(
        self, settings: CheckpointSettings, parts: RunParts, *, process_group: Any = None
    ) -> None:
        self.settings = settings
        self.parts = parts
        self.peers: ControlGroup = control_group(process_group)
        self._lock: SaveLock | None = None
        # Known on every rank, unlike the lock, which the coordinator holds alone.
        self._has_claimed = False
        self._in_flight: AsyncSave | None = None
        self._tier: LocalCheckpoints | GlobalCheckpoints | None = None
        self.last_committed: int | None = None
        """Iteration of the newest checkpoint of this run that is on the disk, complete."""

    # Saving ---------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take the lock of the save directory and sweep up what dead runs left there.

        Call it before training, so that a second run in the same directory ends at once.

        Raises:
            CheckpointError: another run holds the directory, or it cannot be written.
        """
        if self.settings.save is None or self._has_claimed:
            return
        self._lock = claim_directory(storage_path(self.settings.save), self.peers)
        self._has_claimed = True

    def save(self, train_state: TrainState, *, extra: Mapping[str, Any] | None = None) -> None:
        """Save the run at `train_state.iteration`; returns after the commit, or with `--async-save`
        as soon as the state is copied.

        Args:
            extra: more plain values to keep, given back in `Restored.extra`.
        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        assert self.settings.save is not None, "save() without --save"
        self.finish()
        self.claim()
        directory = storage_path(self.settings.save)
        raise_on_all_ranks(moved_away(directory) if self._lock else None, self.peers)
        state = self._declare(train_state, extra)
        iteration = train_state.iteration
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

    def _declare(self, train_state: TrainState, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        flags = {
            "with_optimizer": not self.settings.no_save_optim,
            "with_rng": not self.settings.no_save_rng,
        }

        def declare() -> dict[str, Any]:
            plain = plain_run_state(self.parts, train_state, **flags)
            return declare_run(self.parts, **flags) | plain | {"extra": dict(extra or {})}

        return run_collectively(self.peers, "declaring the state to save", declare)

    def save_non_persistent(
        self, train_state: TrainState, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Save for a quick restart, in the place of the non-persistent checkpoint before.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        kept = self._non_persistent_checkpoints()
        assert kept is not None, "save_non_persistent() without --non-persistent-ckpt-type"
        kept.save(self._declare(train_state, extra), train_state.iteration)
        self._say(f"  saved a non-persistent checkpoint from iteration {train_state.iteration:7d}")

    def _non_persistent_checkpoints(self) -> LocalCheckpoints | GlobalCheckpoints | None:
        if self._tier is None:
            self._tier = open_non_persistent(self.settings, describe_layout(self.parts), self.peers)
        return self._tier

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
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._has_claimed = False

    def _after_commit(self, directory: StoragePath, iteration: int) -> None:
        """The checkpoint exists: point the tracker at it, then let old ones go."""
        self.last_committed = iteration
        problem: MegatronError | None = None
        if self.peers.rank == 0:
            try:
                commit.write_tracker(directory, iteration)
            except OSError as error:
                problem = describe_os_error(
                    error,
                    path=str(directory / commit.TRACKER_NAME),
                    doing="writing",
                    needed_bytes=len(str(iteration)),
                )
        raise_on_all_ranks(problem, self.peers)
        self._say(f"  successfully saved checkpoint from iteration {iteration:7d} to {directory}")
        retention = Retention(self.settings.save_retain_interval, self.settings.most_recent_k)
        for path in apply_retention(directory, iteration, retention, _RUN, peers=self.peers):
            self._say(f"  deleted {path} ({retention})")

    def export_model(self, directory: Path) -> None:
        """Write the newest checkpoint of this run as a Hugging Face model.

        With `--load-hf`, the tokenizer of that model goes along.
        """
        self.finish()
        assert self.settings.save is not None, "export_model() without --save"
        newest = commit.iteration_directory(self.last_committed or 0)
        began_with = self.settings.load_hf
        written = write_collectively(
            storage_path(self.settings.save) / newest,
            directory,
            companion=None if began_with is None else Path(began_with),
            has_adapters=self.parts.weights == "adapters",
            dtype=self.settings.save_hf_dtype,
            peers=self.peers,
        )
        self._say(
            f"  successfully wrote a {written.family} model in {written.dtype} to {directory}"
        )

    def export_adapters(self, directory: Path) -> None:
        """Write the adapters of this run's newest checkpoint as a directory of PEFT's."""
        self.finish()
        assert self.settings.save is not None, "export_adapters() without --save"
        newest = commit.iteration_directory(self.last_committed or 0)
        write_adapters_collectively(
            storage_path(self.settings.save) / newest,
            directory,
            base=self.settings.load_hf,
            peers=self.peers,
        )
        self._say(f"  successfully wrote the adapters to {directory}")

    # Loading --------------------------------------------------------------------------------

    def load(self) -> Restored | None:
        """Load the newest intact checkpoint of `--load`, or the weights of `--load-hf` or
        `--pretrained-checkpoint`.

        Returns:
            what was restored; None if there is nothing to load, which only an empty or absent
            `--load` directory leads to, or the run's own before its first save.
        Raises:
            CheckpointError: on every rank, if what is there cannot be used.
        """
        settings = self.settings
        base = self._load_base() if self.parts.weights == "adapters" else None
        if settings.load is not None:
            restored = self._load_from(
                storage_path(settings.load), settings.ckpt_step, is_finetuning=settings.finetune
            )
            if restored is not None:
                return restored
        if base is not None:
            if settings.load_adapter is not None and settings.load_hf is not None:
                load_adapters_collectively(
                    Path(settings.load_adapter), Path(settings.load_hf), self.parts, self.peers
                )
                self._say(f"  successfully loaded adapters from {settings.load_adapter}")
            return base
        if settings.load_hf is not None:
            return self._load_model(Path(settings.load_hf))
        if settings.pretrained_checkpoint is not None:
            restored = self._load_from(
                storage_path(settings.pretrained_checkpoint), None, is_finetuning=True
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

    def _load_base(self) -> Restored | None:
        """Load the frozen weights that adapters stand beside."""
        parts = dataclasses.replace(self.parts, weights="base", optimizer=None, scheduler=None)
        settings = dataclasses.replace(
            self.settings, load=None, save=None, non_persistent_ckpt_type=None
        )
        return Checkpointer(settings, parts, process_group=self.peers).load()

    def _load_from(
        self, directory: StoragePath, ckpt_step: int | None, *, is_finetuning: bool
    ) -> Restored | None:
        selection = self._select(directory, ckpt_step)
        for note in selection.notes:
            self._say(note)
        if ckpt_step is None and not is_finetuning:
            newest = selection.candidates[0].iteration if selection.candidates else -1
            restored = self._load_non_persistent(newest if isinstance(newest, int) else -1)
            if restored is not None:
                return restored
        problems: list[CheckpointError] = []
        for found in selection.candidates:
            try:
                contents = open_any(found.path, peers=self.peers)
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

    def _load_model(self, directory: Path) -> Restored:
        """Load the weights of a Hugging Face model."""
        restored = self._load_contents(open_collectively(directory, self.peers), is_finetuning=True)
        self._say(f"  successfully loaded weights from {directory}")
        if self.peers.rank == 0:
            dtype = next(self.parts.model[0].parameters()).dtype
            if note := note_on_precision(directory, dtype):
                self._say(note)
        return restored

    def _select(self, directory: StoragePath, ckpt_step: int | None) -> Selection:
        """Decide on the coordinator, for all."""
        selection, problem = Selection(), None
        if self.peers.rank == 0:
            try:
                selection = select_checkpoints(directory, ckpt_step, save=self.settings.save)
            except OSError as error:
                problem = describe_os_error(error, path=str(directory), doing="reading")
            except CheckpointError as error:
                problem = error
        raise_on_all_ranks(problem, self.peers)
        chosen: Selection = self.peers.broadcast(selection)
        return chosen

    def _load_non_persistent(self, newest_kept: int) -> Restored | None:
        """Load the non-persistent checkpoint if it is newer than those of `--load`."""
        kept = self._non_persistent_checkpoints()
        if kept is None:
            return None
        try:
            if isinstance(kept, GlobalCheckpoints):
                iteration = kept.newest()
                if iteration is None or iteration <= newest_kept:
                    return None
                restored = self._load_contents(kept.open(iteration), is_finetuning=False)
            else:
                found = kept.newest()
                if found is None or found.iteration <= newest_kept:
                    return None
                iteration = found.iteration
                for rank, ring in found.rings.items():
                    self._say(f"  rank {rank} gets its non-persistent checkpoint from copy {ring}")
                restored = self._load_own(kept.fetch(found))
        except DamagedCheckpointError as error:
            self._say(f"the non-persistent checkpoint cannot be used:\n{error}")
            return None
        self._say(
            f"  successfully loaded the non-persistent checkpoint of iteration {iteration}; the "
            f"newest in {self.settings.load} is {newest_kept if newest_kept >= 0 else 'none'}"
        )
        return restored

    def _load_contents(self, contents: Contents, *, is_finetuning: bool) -> Restored:
        settings = self.settings
        is_upcycling = settings.moe_use_upcycling and is_dense(contents.manifest)
        is_finetuning = is_finetuning or is_upcycling
        with_optimizer = not (is_finetuning or settings.no_load_optim)
        with_rng = not (is_finetuning or settings.no_load_rng)
        has_optimizer = self.parts.optimizer is not None
        if isinstance(contents, InteropContents):
            for line in check_interop(contents, needs_moments=with_optimizer and has_optimizer):
                self._say(f"  {line}")
        template = self._template(with_optimizer=with_optimizer, with_rng=with_rng)
        if is_upcycling:
            template = read_from_dense(template, contents.manifest)
            self._say("  every expert begins as a copy of the dense MLP of its layer")
        strict = parse_strict_handling(settings.dist_ckpt_strictness)
        note = compare_heads(template, contents, strict, peers=self.peers)
        if note:
            self._say(f"  {note}")
        generators = template.get("generators")
        if generators is not None and generators.unique_key not in contents.objects:
            del template["generators"]  # another grid of ranks; nothing of ours depends on it
        loaded = load_state(
            template,
            contents,
            peers=self.peers,
            strict=strict,
            key_mapping=stored_key,
        )
        if isinstance(contents, InteropContents) and with_optimizer and has_optimizer:
            complete_interop_state(self.parts, loaded.state, template["optimizer"], contents)
        flags = {"with_optimizer": with_optimizer, "with_rng": with_rng}
        return self._take_over(contents, loaded, **flags, is_finetuning=is_finetuning)

    def _load_own(self, contents: Contents) -> Restored:
        """Load what this rank saved for itself."""
        flags = {
            "with_optimizer": not self.settings.no_load_optim,
            "with_rng": not self.settings.no_load_rng,
        }
        template = as_local_state(self._template(**flags))
        loaded = run_collectively(
            self.peers,
            f"loading {contents.directory}",
            lambda: load_state(template, contents, peers=SingleProcess()),
        )
        return self._take_over(contents, loaded, **flags, is_finetuning=False)

    def _template(self, *, with_optimizer: bool, with_rng: bool) -> dict[str, Any]:
        return run_collectively(
            self.peers,
            "declaring the state to load",
            lambda: declare_run(
                self.parts, with_optimizer=with_optimizer, with_rng=with_rng, is_loading=True
            ),
        )

    def _take_over(self, contents: Contents, loaded: Loaded, **flags: bool) -> Restored:
        restored = run_collectively(
            self.peers,
            f"taking over the state of {contents.directory}",
            lambda: take_over(self.parts, contents, loaded, **flags),
        )
        before, now = show_layout(restored.layout), show_layout(describe_layout(self.parts))
        if before != now:
            self._say(f"  layout of the checkpoint: {before}; of this run: {now}")
        return restored

    def _say(self, text: str) -> None:
        if self.peers.rank == 0:
            print(text, flush=True)
