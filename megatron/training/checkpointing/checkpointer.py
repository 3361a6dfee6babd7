"""Save and load a run, for the training loop and for Megatron's functions.

Every method is a collective over all processes of the run: if one process fails, all raise its
error. `saver` writes and commits checkpoints, `selection` selects the checkpoint to load, and
`restore` loads it into the run. `ResumeSource` finds the initial state of a run: a checkpoint, the
weights of another model, or nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from megatron.core.dist_checkpointing import async_save
from megatron.core.dist_checkpointing.collective import (
    AgreeingGroup,
    print_once,
    run_on_coordinator,
)
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.distributed.adapter_parameters import set_magnitudes
from megatron.core.foundation.errors import CheckpointError
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import ControlGroup, control_group
from megatron.training.checkpointing.hugging_face import (
    load_adapters_collectively,
    note_on_precision,
    open_collectively,
    write_adapters_collectively,
    write_collectively,
)
from megatron.training.checkpointing.memory import MemoryCheckpoints
from megatron.training.checkpointing.non_persistent import (
    NonPersistentCheckpoints,
    open_non_persistent,
)
from megatron.training.checkpointing.restore import NOT_FOR_OWN_STATE, Restored, Restorer
from megatron.training.checkpointing.run_state import (
    CheckpointContext,
    apply_optimizer,
    describe_layout,
)
from megatron.training.checkpointing.saver import Saver
from megatron.training.checkpointing.selection import (
    Selection,
    missing,
    missing_pretrained,
    no_intact_checkpoint,
    select_checkpoints,
)
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.run.state import TrainState

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
        self._saver = Saver(settings, context, self.peers)
        self._has_non_persistent = False

    @_collective("claiming the save directory")
    def claim(self) -> None:
        """Lock the save directory and delete the unfinished files of interrupted runs.

        Call it before training, so that a second run in the same directory fails at once.

        Raises:
            CheckpointError: another run has locked the directory, or it is not writable.
        """
        self._saver.claim()

    @_collective("saving a checkpoint")
    def save(self, train_state: TrainState, *, extra: Mapping[str, object] | None = None) -> None:
        """Save the run at `train_state.iteration`. Returns after the commit, or with `--async-save`
        after the state is copied.

        Args:
            extra: additional plain values, returned in `Restored.extra` after a load.
        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        self._saver.save(train_state, extra)

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
        self.non_persistent.save(self._saver.declare(train_state, extra), iteration)
        self._has_non_persistent = True
        print_once(self.peers, f"  saved a non-persistent checkpoint from iteration {iteration:7d}")

    @property
    def last_committed(self) -> int | None:
        """Iteration of this run's newest complete checkpoint."""
        return self._saver.last_committed

    @property
    def has_save_in_flight(self) -> bool:
        """Whether an asynchronous save is not committed yet."""
        return async_save.in_flight() is not None

    def after_step(self) -> None:
        """Commit an asynchronous save if all bytes are written, or raise its error."""
        if self.has_save_in_flight:  # on all ranks or none: other steps have no collective
            self.peers.run("committing a checkpoint", self._saver.after_step)

    def finish(self) -> None:
        """Wait for an asynchronous save and commit it."""
        if self.has_save_in_flight:
            self.peers.run("committing a checkpoint", self._saver.finish)

    def close(self) -> None:
        """Finish, and unlock the save directory."""
        self.finish()
        self._saver.close()

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
        self._saver.finish()
        begins_with_newest = self.settings.load is not None and self.settings.ckpt_step is None
        is_own = self._has_non_persistent or begins_with_newest
        source = self._source(self.non_persistent if is_own else None)
        return source.load_newest(not_after, last_saved=self.last_committed)

    def _source(self, non_persistent: NonPersistentCheckpoints | None) -> ResumeSource:
        return ResumeSource(self.settings, self.context, self.peers, non_persistent, self.memory)

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
            self._saver.newest(),
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
            self._saver.newest(), directory, base=self.settings.load_hf, peers=self.peers
        )
        print_once(self.peers, f"  successfully wrote the adapters to {directory}")


class ResumeSource:
    """Finds and loads the initial state of a run. Every method is a collective."""

    def __init__(
        self,
        settings: CheckpointSettings,
        context: CheckpointContext,
        peers: ControlGroup,
        non_persistent: NonPersistentCheckpoints | None = None,
        memory: MemoryCheckpoints | None = None,
    ) -> None:
        self.settings, self.context, self.peers = settings, context, peers
        self.non_persistent, self.memory = non_persistent, memory
        self.restorer = Restorer(settings, context, peers)

    def load(self) -> Restored | None:
        """Load the newest intact checkpoint of `--load`, or the weights of `--load-hf` or
        `--pretrained-checkpoint`.

        Returns:
            None if there is nothing to load: the directory of `--load` is missing, empty, or the
            run's own directory before its first save.
        Raises:
            CheckpointError: the checkpoint is unusable; on every rank.
        """
        settings = self.settings
        base = self._load_base() if self.context.weights == "adapters" else None
        if settings.load is not None:
            restored = self._load_from(
                storage_path(settings.load), settings.ckpt_step, is_finetuning=settings.finetune
            )
            if restored is not None:
                return restored
        elif self.memory is not None and self.memory.newest_iteration >= 0:
            return self.memory.load()
        if base is not None:
            set_magnitudes(self.context.model)
            if settings.load_adapter is not None and settings.load_hf is not None:
                load_adapters_collectively(
                    Path(settings.load_adapter), Path(settings.load_hf), self.context, self.peers
                )
                print_once(
                    self.peers, f"  successfully loaded adapters from {settings.load_adapter}"
                )
            apply_optimizer(self.context, {}, was_loaded=False)
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
            print_once(
                self.peers,
                f"WARNING: {settings.load} contains no checkpoint yet: starting from random weights"
                " (--exit-on-missing-checkpoint makes this an error)",
            )
        return None

    def load_newest(self, not_after: int, *, last_saved: int | None) -> Restored | None:
        """Load the newest state of the run itself, without the flags for the first load.

        Args:
            not_after: the latest iteration of --load that may be loaded.
            last_saved: iteration of the newest checkpoint of this run in --save, if there is one.
        Returns:
            None if there is no saved state.
        """
        settings = self.settings
        own = dataclasses.replace(settings, **NOT_FOR_OWN_STATE)
        self.restorer = Restorer(own, self.context, self.peers)
        if self.memory is not None:
            self.memory.find_newest()
        # A directory may contain later iterations if --ckpt-step has loaded an earlier one.
        places: list[tuple[str, int | None, int]] = []
        if last_saved is not None and settings.save is not None:
            places.append((settings.save, None, last_saved))
        if settings.load is not None and not settings.finetune:
            places.append((settings.load, settings.ckpt_step, not_after))
        for directory, ckpt_step, newest in places:
            restored = self._load_from(
                storage_path(directory), ckpt_step, is_finetuning=False, not_after=newest
            )
            if restored is not None:
                return restored
        if self.memory is not None and self.memory.newest_iteration >= 0:
            return self.memory.load()
        return self._load_non_persistent(-1)

    def _load_base(self) -> Restored | None:
        """Load the frozen weights that the adapters are added to."""
        context = dataclasses.replace(self.context, weights="base", optimizer=None, scheduler=None)
        settings = dataclasses.replace(self.settings, load=None, save=None)
        return ResumeSource(settings, context, self.peers).load()

    def _load_from(
        self,
        directory: StoragePath,
        ckpt_step: int | None,
        *,
        is_finetuning: bool,
        not_after: int | None = None,
    ) -> Restored | None:
        selection = self._select(directory, ckpt_step)
        if not_after is not None:
            selection.candidates = [
                found
                for found in selection.candidates
                if not isinstance(found.iteration, int) or found.iteration <= not_after
            ]
        for note in selection.notes:
            print_once(self.peers, note)
        in_memory = -1 if self.memory is None else self.memory.newest_iteration
        is_newest_wanted = ckpt_step is None and not is_finetuning and not selection.is_set_back
        if is_newest_wanted or in_memory >= 0:
            newest = selection.candidates[0].iteration if selection.candidates else -1
            newest = newest if isinstance(newest, int) else -1
            restored = self._load_non_persistent(max(newest, in_memory))
            if restored is not None:
                return restored
            if self.memory is not None and in_memory >= 0 and in_memory >= newest:
                return self.memory.load()
        problems: list[CheckpointError] = []
        for found in selection.candidates:
            try:
                contents = open_any(found.path, peers=self.peers)
                restored = self.restorer.restore(contents, is_finetuning=is_finetuning)
            except DamagedCheckpointError as error:
                # All ranks raise the same error, so all continue with the same next candidate.
                print_once(self.peers, f"{found.path} cannot be used:\n{error}")
                problems.append(error)
                continue
            what = "weights" if is_finetuning else "checkpoint"
            why = " (newer ones are damaged)" if problems else ""
            print_once(
                self.peers,
                f"  successfully loaded {what} from {found.path} at iteration "
                f"{contents.common_state().get('iteration', 0)}{why}",
            )
            return restored
        if problems:
            raise no_intact_checkpoint(directory, problems)
        return None

    def _load_model(self, directory: Path) -> Restored:
        """Load the weights of a Hugging Face model."""
        restored = self.restorer.restore(
            open_collectively(directory, self.peers), is_finetuning=True
        )
        print_once(self.peers, f"  successfully loaded weights from {directory}")
        if self.peers.rank == 0:
            dtype = next(self.context.model[0].parameters()).dtype
            if note := note_on_precision(directory, dtype):
                print_once(self.peers, note)
        return restored

    def _select(self, directory: StoragePath, ckpt_step: int | None) -> Selection:
        """Select checkpoints on the coordinator, and broadcast the selection."""
        return run_on_coordinator(
            self.peers,
            lambda: select_checkpoints(directory, ckpt_step, save=self.settings.save),
            doing="reading",
            path=directory,
        )

    def _load_non_persistent(self, newest_kept: int) -> Restored | None:
        """Load the non-persistent checkpoint if its iteration is later than `newest_kept`."""
        if self.non_persistent is None:
            return None
        try:
            restored = self.non_persistent.load_newer(newest_kept, self.restorer)
        except DamagedCheckpointError as error:
            print_once(self.peers, f"the non-persistent checkpoint cannot be used:\n{error}")
            return None
        if restored is not None:
            print_once(
                self.peers,
                "  successfully loaded the non-persistent checkpoint of iteration "
                f"{restored.train_state.iteration}; the newest in {self.settings.load} is "
                f"{newest_kept if newest_kept >= 0 else 'none'}",
            )
        return restored
