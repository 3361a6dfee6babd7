"""`deepspeed.checkpointing`: activations that are computed again in backward."""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import checkpoint as recompute

__all__ = ["checkpoint", "configure", "is_configured"]


def configure(*unused: object, **settings: object) -> None:
    """Accept settings; what is kept are the inputs, where they are."""


def is_configured() -> bool:
    """Return True: nothing needs to be configured."""
    return True


def checkpoint(function: object, *args: object) -> Any:
    """Call a function, and call it again in backward instead of keeping what it computes."""
    return recompute(function, *args, use_reentrant=False)
