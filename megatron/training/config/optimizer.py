"""Flags of the optimizer and of regularisation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.optimizer.optimizer_config import OptimizerFlags
from megatron.core.settings.flags import SettingsGroup, flag, required

_NO_OPTIMIZER = "use --optimizer muon"


@dataclass(kw_only=True)
class OptimizerSettings(OptimizerFlags, SettingsGroup):
    """Optimizer, weight decay, clipping, dropout, precision of optimizer state."""

    start_weight_decay: float = required()
    """First value of a weight decay that changes over time."""
    end_weight_decay: float = required()
    """Last value of it."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """How it changes."""
    no_weight_decay_cond_type: str | None = flag(None, choices=("apply_wd_to_qk_layernorm",))
    """Another spelling of --apply-wd-to-qk-layernorm."""
    param_rules: list[str] = flag([], nargs="+")
    """Settings of single parameters, each PATTERN:NAME=VALUE,... with a shell pattern on names and
    any of lr_mult, wd_mult, max_lr, min_lr, start_wd, end_wd, optimizer; later ones win. Example:
    "*.mlp.*.weight:lr_mult=0.5,wd_mult=0"."""
