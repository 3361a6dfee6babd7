"""Where a run stands, for the message that is written if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class RunProgress:
    """Updated as the run goes on; read once, after a failure."""

    rank: int = 0
    iteration: int = 0
    where: str = "start"
    """What the run was doing."""
    last_good_checkpoint: int | None = None
    """Iteration of the newest committed checkpoint that this run knows of."""
    save_directory: str | None = None

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Name what is being done; a failure inside leaves the name."""
        outer = self.where
        self.where = where
        yield
        self.where = outer
