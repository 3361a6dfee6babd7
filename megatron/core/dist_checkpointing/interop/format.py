"""What a format of checkpoints is: a record of how its files are told, read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.loader import Contents


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """Files of a checkpoint, as another program or an extension of this one arranges them."""

    name: str
    """Value of `tools/checkpoint export --format`."""
    recognises: Callable[[Path], bool]
    """Says by the names in a directory whether it holds such a checkpoint."""
    open: Callable[[Path], Contents]
    """Reads what is there; tensors are read later, slice by slice."""
    write: Callable[[Contents, Path, bool], None] | None = None
    """Writes into an empty directory; the last argument is whether the optimizer state goes
    along."""
