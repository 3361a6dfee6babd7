"""Rules that settings must obey, and the refusal of what does not exist."""

from __future__ import annotations

from megatron.core.errors import raise_together
from megatron.training.resolve import ResolvedRun
from megatron.training.rules import (  # noqa: F401
    adapters,
    batch,
    data,
    model,
    optimizer,
    parallelism,
    run_control,
)
from megatron.training.rules.registry import broken_rules
from megatron.training.rules.support import notes, refusals

__all__ = ["check_run", "notes"]


def check_run(run: ResolvedRun) -> None:
    """Raise every problem of the settings in one ConfigError, or return."""
    raise_together([*refusals(run.config), *broken_rules(run)], summary="the settings of this run")
