"""`deepspeed.checkpointing`: recompute activations in backward."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import checkpoint as recompute

__all__ = ["checkpoint", "configure", "is_configured"]


def configure(*unused: object, **settings: object) -> None:
    """Accept and ignore settings: only the inputs are saved, on their device."""


def is_configured() -> bool:
    """Return True: there is nothing to configure."""
    return True


def checkpoint(function: object, *args: object) -> Any:
    """Call a function and recompute its activations in backward instead of saving them."""
    return recompute(function, *args, use_reentrant=False)
