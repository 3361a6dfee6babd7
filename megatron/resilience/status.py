"""The state of a run, for the report of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.foundation.flight_recorder import PROGRESS, Field
from megatron.core.foundation.rendezvous import restart_count
from megatron.resilience.heartbeat import Heartbeat
from megatron.resilience.process_watch import LocalPeers, ProcessWatch
from megatron.training.launch import rank_info


@dataclass
class RunStatus:
    """The run updates these fields; the report of a failure reads them."""

    rank: int = 0
    local_rank: int = 0
    attempt: int = 0
    """How often the launcher has restarted the run."""
    iteration: int = 0
    activity: str = "reading the settings"
    has_begun: bool = False
    """Whether the settings are valid; before, reports contain no iteration and checkpoint."""
    last_good_checkpoint: int | None = None
    """Iteration of the newest committed checkpoint that this run has loaded or saved."""
    save_directory: str | None = None
    has_claimed: bool = False
    """Whether this run owns the save directory; no other run may save or report there."""
    store: Any = None
    """The rendezvous store, once it is connected."""
    peers: LocalPeers | None = None
    """The other ranks of this node, once they are known."""
    watch: ProcessWatch | None = None
    """The watch of a rank that torchrun started."""
    heartbeat: Heartbeat | None = None
    has_reported: bool = False
    """Whether this process has reported its failure."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field, and record it for the watchdog."""
        object.__setattr__(self, name, value)
        if name == "activity":
            PROGRESS.set_activity(str(value))
        elif name == "iteration":
            PROGRESS.set_field(Field.ITERATION, self.iteration)
        elif name == "last_good_checkpoint":
            newest = self.last_good_checkpoint
            PROGRESS.set_field(Field.CHECKPOINT, 0 if newest is None else 1 + newest)

    @classmethod
    def of_this_process(cls) -> RunStatus:
        """Return the status of a new run."""
        info = rank_info.read_rank_info()
        return cls(rank=info.rank, local_rank=info.local_rank, attempt=restart_count())

    def reset(self, rank: int, local_rank: int, attempt: int) -> None:
        """Prepare for another attempt in the same process."""
        self.rank, self.local_rank, self.attempt = rank, local_rank, attempt
        self.iteration, self.last_good_checkpoint = 0, None
        self.has_begun = self.has_claimed = False
        self.peers = self.store = None

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Set the activity in a block; after an exception it stays set, for the report."""
        outer = self.activity
        self.activity = activity
        yield
        self.activity = outer
