"""Policies for a load whose requested keys differ from the stored keys."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from enum import Enum

from megatron.core.foundation.errors import CheckpointError

logger = logging.getLogger(__name__)


class StrictHandling(Enum):
    """Policies for key mismatches.

    Unexpected keys are requested and not stored; missing keys are stored and requested by no rank.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Every requested key must be stored; other stored keys are ignored."""
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @property
    def compares_all_ranks(self) -> bool:
        """Whether the policy handles missing keys, which takes one more gather."""
        return self in (self.LOG_ALL, self.RAISE_ALL, self.RETURN_ALL)

    @property
    def tolerates_unexpected(self) -> bool:
        """Whether the result omits keys that are not stored, instead of raising."""
        return self not in (self.ASSUME_OK_UNEXPECTED, self.RAISE_UNEXPECTED, self.RAISE_ALL)

    @property
    def returns_keys(self) -> bool:
        """Whether `load` returns (state dict, missing keys, unexpected keys)."""
        return self in (self.RETURN_UNEXPECTED, self.RETURN_ALL)


def parse_strict_handling(value: str | StrictHandling) -> StrictHandling:
    """Return the policy of a name such as "raise_all"."""
    return value if isinstance(value, StrictHandling) else StrictHandling(value)


def apply_strictness(
    strict: StrictHandling,
    *,
    unexpected: Collection[str],
    missing: Collection[str],
    stored: Collection[str],
) -> None:
    """Log or refuse mismatches.

    Raises:
        CheckpointError: the policy refuses the mismatch.
    """
    if unexpected and not strict.tolerates_unexpected:
        raise CheckpointError(
            f"not in the checkpoint: {_some(unexpected)}.{_nearest(sorted(unexpected)[0], stored)}",
            rule="every key that the model, optimizer and scheduler request must be stored",
            flags=["--dist-ckpt-strictness", "--no-load-optim", "--finetune"],
            fix="load it into the model it was saved from, or relax the strictness",
        )
    if missing and strict is StrictHandling.RAISE_ALL:
        raise CheckpointError(
            f"stored, and requested by no rank: {_some(missing)}.",
            rule="with strictness raise_all every stored key is loaded",
            flags=["--dist-ckpt-strictness"],
            fix="use --dist-ckpt-strictness raise_unexpected",
        )
    if strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL) and unexpected:
        logger.warning("not in the checkpoint, kept as they are: %s", _some(unexpected))
    if strict is StrictHandling.LOG_ALL and missing:
        logger.warning("in the checkpoint and not loaded: %s", _some(missing))


def _some(keys: Collection[str]) -> str:
    shown = sorted(keys)[:5]
    rest = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _nearest(key: str, stored: Collection[str]) -> str:
    close = difflib.get_close_matches(key, stored, n=1, cutoff=0.5)
    return f" The nearest stored key is {close[0]!r}." if close else ""
