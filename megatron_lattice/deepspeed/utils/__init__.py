"""`deepspeed.utils`: its logging functions."""

from __future__ import annotations

from logging import INFO, getLogger

from megatron_lattice.deepspeed.comm import get_rank
from megatron_lattice.deepspeed.zero import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    set_z3_leaf_modules,
)

__all__ = [
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "set_z3_leaf_modules",
]

logger = getLogger("megatron_lattice.deepspeed")
"""Named after the package; the script sets its handlers."""


def log_dist(message: object, ranks: list[int] | None = None, level: int = INFO) -> None:
    """Log on the given ranks: by default the first rank; -1 means all ranks."""
    wanted = ranks or [0]
    if -1 in wanted or get_rank() in wanted:
        logger.log(level, "[rank %d] %s", get_rank(), message)
