"""Save and load a run: what the loop and Megatron's functions both are built on.

Every method is a collective over all processes of the run. `saver` decides when bytes become a
checkpoint, `resume` which one is loaded, `restore` how its state gets into the run.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from megatron.core.dist_checkpointing import async_save
from megatron.core.dist_checkpointing.collective import print_once
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.foundation.errors import CheckpointError
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import ControlGroup, control_group
from megatron.training.checkpointing.hugging_face import (
    write_adapters_collectively,
    write_collectively,
)
from megatron.training.checkpointing.memory import MemoryCheckpoints
from megatron.training.checkpointing.non_persistent import open_non_persistent
from megatron.training.checkpointing.restore import Restored
from megatron.training.checkpointing.resume import ResumeSource
from megatron.training.checkpointing.run_state import CheckpointContext, describe_layout
from megatron.training.checkpointing.saver import Saver
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.run.state import TrainState


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
            memory: what this process has in memory, and the number of its node.
        """
        self.settings = settings
        self.context = context
        self.peers: ControlGroup = control_group(
            torch_collectives.world() if process_group is None else process_group
        )
        self.non_persistent = open_non_persistent(settings, describe_layout(context), self.peers)
        self.memory = (
            None
            if memory is None
            else MemoryCheckpoints(memory[0], settings, context, self.peers, memory[1])
        )
        self._saver = Saver(settings, context, self.peers)
        self._has_non_persistent = False

    def claim(self) -> None:
        """Lock the save directory and delete what interrupted runs left there.

        Call it before training, so that a second run in the same directory ends at once.

        Raises:
            CheckpointError: another run holds the directory, or it cannot be written.
        """
        self._saver.claim()

    def save(self, train_state: TrainState, *, extra: Mapping[str, object] | None = None) -> None:
        """Save the run at `train_state.iteration`; returns after the commit, or with `--async-save`
        as soon as the state is copied.

        Args:
            extra: more plain values to keep, given back in `Restored.extra`.
        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        self._saver.save(train_state, extra)

    def save_non_persistent(
        self, train_state: TrainState, *, extra: Mapping[str, object] | None = None
    ) -> None:
        """Save for a quick restart; replaces the non-persistent checkpoint before.

        Raises:
            CheckpointError: on every rank; earlier checkpoints are intact.
        """
        iteration = train_state.iteration
        if self.non_persistent is None:
            raise CheckpointError(
                "no kind of non-persistent checkpoint is chosen.",
                flags=["--non-persistent-ckpt-type"],
                fix="choose global or local, or save a checkpoint that stays",
            )
        self.non_persistent.save(self._saver.declare(train_state, extra), iteration)
        self._has_non_persistent = True
        print_once(self.peers, f"  saved a non-persistent checkpoint from iteration {iteration:7d}")

    @property
    def last_committed(self) -> int | None:
        """Iteration of the newest checkpoint of this run that is on the disk, complete."""
        return self._saver.last_committed

    @property
    def has_save_in_flight(self) -> bool:
        """Whether an asynchronous save is not committed yet."""
        return async_save.in_flight() is not None

    def after_step(self) -> None:
        """Commit an asynchronous save whose bytes are on the disk; its error is raised here."""
        self._saver.after_step()

    def finish(self) -> None:
        """Wait for an asynchronous save and commit it: before the next save and at the end."""
        self._saver.finish()

    def close(self) -> None:
        """Finish, and unlock the save directory."""
        self._saver.close()

    def load(self) -> Restored | None:
        """Load the newest intact checkpoint of `--load`, or the weights of `--load-hf` or
        `--pretrained-checkpoint`; see `ResumeSource.load`."""
        source = ResumeSource(
            self.settings, self.context, self.peers, self.non_persistent, self.memory
        )
        return source.load()

    def load_newest(self, not_after: int) -> Restored | None:
        """Load the newest state that this run has kept or begun with, into the running parts.

        Args:
            not_after: iteration where the run stands.
        Returns:
            None if nothing was kept.
        """
        self.finish()
        begins_with_newest = self.settings.load is not None and self.settings.ckpt_step is None
        is_own = self._has_non_persistent or begins_with_newest
        source = ResumeSource(
            self.settings,
            self.context,
            self.peers,
            self.non_persistent if is_own else None,
            self.memory,
        )
        return source.load_newest(not_after, last_saved=self.last_committed)

    def export_model(self, directory: Path) -> None:
        """Write the newest checkpoint of this run as a Hugging Face model.

        The run's tokenizer is written beside it; with `--load-hf` and no tokenizer of text but
        that model's, that model's files are.
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

    def export_adapters(self, directory: Path) -> None:
        """Write the adapters of this run's newest checkpoint as a directory of PEFT's."""
        write_adapters_collectively(
            self._saver.newest(), directory, base=self.settings.load_hf, peers=self.peers
        )
        print_once(self.peers, f"  successfully wrote the adapters to {directory}")
