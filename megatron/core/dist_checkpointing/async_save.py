"""Saving while training continues: a snapshot, a thread that writes, a commit at a step boundary.

Hashing and writing release the interpreter lock, so a thread is enough. At most one save is in
flight. "Saved" is logged only after the commit; a writer's error is raised at the next step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from megatron.core.dist_checkpointing.collective import as_checkpoint_error
from megatron.core.dist_checkpointing.save_in_progress import SaveInProgress
from megatron.core.dist_checkpointing.snapshot import SnapshotBuffer
from megatron.core.foundation.errors import CheckpointError

NICENESS = 12
"""Training has priority if cores are scarce: on Linux a thread of this niceness gets 6 % of a core
that another thread keeps busy."""

_BUFFER = SnapshotBuffer()
_IN_FLIGHT: AsyncSave | None = None


def in_flight() -> AsyncSave | None:
    """Return the asynchronous save of this process that is not committed yet."""
    return _IN_FLIGHT


def abandon() -> None:
    """Give up the save in flight without the other ranks; its files remain."""
    global _IN_FLIGHT
    if _IN_FLIGHT is not None:
        _IN_FLIGHT._thread.join()
        _IN_FLIGHT._is_finished = True
        _IN_FLIGHT = None


def lower_priority() -> None:
    """Lower the priority of this thread, and of threads that it starts, below training's."""
    # Linux gives each thread a priority of its own, which the threads it starts inherit.
    with contextlib.suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


class AsyncSave:
    """A save whose bytes are being written in the background."""

    def __init__(self, saving: SaveInProgress) -> None:
        self._saving = saving
        self._after_commit: list[Callable[[], None]] = []
        # Not a daemon: the interpreter waits for the write instead of interrupting it.
        self._thread = threading.Thread(target=self._write, name="checkpoint-writer")
        self._is_finished = False

    @classmethod
    def start(cls, saving: SaveInProgress) -> AsyncSave:
        """Copy this rank's share and begin to write it; training may change its tensors now."""
        global _IN_FLIGHT
        if _IN_FLIGHT is not None:
            raise CheckpointError(
                "a checkpoint is still being written.",
                rule="one asynchronous save at a time",
                flags=["--async-save", "--save-interval"],
                fix="finish the earlier save first",
            )
        problem = None
        try:
            saving.take_snapshot(_BUFFER)
        except Exception as error:  # if one rank is out of memory, the others must not hang
            problem = as_checkpoint_error(error, "copying the state for an asynchronous save")
        saving.cancel_if(problem)
        handle = _IN_FLIGHT = cls(saving)
        handle._thread.start()
        return handle

    def _write(self) -> None:
        lower_priority()
        self._saving.write(in_background=True)

    def add_finalize_fn(self, function: Callable[[], None]) -> None:
        """Call `function` on this rank once the checkpoint is committed, in order."""
        self._after_commit.append(function)

    @property
    def is_written(self) -> bool:
        """Whether this rank's bytes are on the disk (or its write has failed): local."""
        return not self._thread.is_alive()

    def try_finish(self) -> bool:
        """Commit if all ranks have written: collective, called at step boundaries.

        Returns:
            whether the checkpoint is committed now.
        """
        if not self._is_finished:
            peers = self._saving.peers
            written = peers.gather(self.is_written)
            if not peers.broadcast(written is not None and all(written)):
                return False
            self.finish()
        return True

    def finish(self) -> None:
        """Wait for the writers and commit: collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write.
        """
        global _IN_FLIGHT
        if self._is_finished:
            return
        self._thread.join()
        self._is_finished = True
        if _IN_FLIGHT is self:
            _IN_FLIGHT = None
        self._saving.finish()
        for function in self._after_commit:
            function()
