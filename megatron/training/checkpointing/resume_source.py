"""Find and load the initial state of a run: a checkpoint, the weights of another model, or nothing.

`selection` selects the checkpoint to load, and `restore` loads it into the run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.core.dist_checkpointing.collective import print_once, run_on_coordinator
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.distributed.adapter_parameters import set_magnitudes
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport.object_collectives import ControlGroup
from megatron.training.checkpointing.hugging_face import (
    load_adapters_collectively,
    note_on_precision,
    open_collectively,
)
from megatron.training.checkpointing.memory import MemoryCheckpoints
from megatron.training.checkpointing.non_persistent import NonPersistentCheckpoints
from megatron.training.checkpointing.restore import NOT_FOR_OWN_STATE, Restored, Restorer
from megatron.training.checkpointing.run_state import CheckpointContext, apply_optimizer
from megatron.training.checkpointing.selection import (
    missing,
    missing_pretrained,
    no_intact_checkpoint,
    select_checkpoints,
)
from megatron.training.config.checkpoint import CheckpointSettings


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
        # The coordinator selects, and all ranks use its selection.
        selection = run_on_coordinator(
            self.peers,
            lambda: select_checkpoints(directory, ckpt_step, save=self.settings.save),
            doing="reading",
            path=directory,
        )
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
            open_collectively(directory, self.context, self.peers), is_finetuning=True
        )
        print_once(self.peers, f"  successfully loaded weights from {directory}")
        if self.peers.rank == 0:
            dtype = next(self.context.model[0].parameters()).dtype
            if note := note_on_precision(directory, dtype):
                print_once(self.peers, note)
        return restored

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
