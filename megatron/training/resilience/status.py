"""Where a run stands, for the message that is written if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.foundation.heartbeat.layout import Word
from megatron.core.foundation.heartbeat.place import PLACE
from megatron.core.foundation.rendezvous import restart_count
from megatron.training.launch import rank_info
from megatron.training.resilience.hangs import Heart
from megatron.training.resilience.peers import LocalPeers
from megatron.training.resilience.watch import Watch


@dataclass
class RunStatus:
    """Updated as the run continues; read once, after a failure."""

    rank: int = 0
    local_rank: int = 0
    attempt: int = 0
    """How often the launcher has started the run again."""
    iteration: int = 0
    activity: str = "reading the settings"
    """What the run was doing."""
    has_begun: bool = False
    """Whether the settings were good: before, no iteration and no checkpoint are worth telling."""
    last_good_checkpoint: int | None = None
    """Iteration of the newest committed checkpoint that this run knows of."""
    save_directory: str | None = None
    has_claimed: bool = False
    """Whether the save directory is this run's own; no other run may save there, nor report."""
    store: Any = None
    """The rendezvous store, once it is connected."""
    peers: LocalPeers | None = None
    """The ranks of this node, once they are known."""
    watch: Watch | None = None
    """Of a rank that torchrun started."""
    heart: Heart | None = None
    """What tells the watchdog that this process lives, once there is one."""
    has_reported: bool = False
    """Whether this process has told of its failure."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "activity":
            PLACE.say(str(value))
        elif name == "iteration":
            PLACE.note(Word.ITERATION, self.iteration)
        elif name == "last_good_checkpoint":
            newest = self.last_good_checkpoint
            PLACE.note(Word.CHECKPOINT, 0 if newest is None else 1 + newest)

    @classmethod
    def of_this_process(cls) -> RunStatus:
        """Return the status of a run that begins."""
        info = rank_info.read_rank_info()
        return cls(rank=info.rank, local_rank=info.local_rank, attempt=restart_count())

    def begin_anew(self, rank: int, local_rank: int, attempt: int) -> None:
        """Begin another attempt in the same process."""
        self.rank, self.local_rank, self.attempt = rank, local_rank, attempt
        self.iteration, self.last_good_checkpoint = 0, None
        self.has_begun = self.has_claimed = False
        self.peers = self.store = None

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Name what is being done; a failure inside leaves the name."""
        outer = self.activity
        self.activity = activity
        yield
        self.activity = outer
