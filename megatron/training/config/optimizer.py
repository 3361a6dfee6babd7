"""Flags of the optimizer, of precision, activation memory and fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.optimizer.optimizer_config import OptimizerFlags
from megatron.core.settings.flags import SettingsGroup, flag, required
from megatron.core.transformer.config.precision import (
    ActivationOffloadConfig,
    GraphConfig,
    PrecisionConfig,
    RecomputeConfig,
)

_NO_OPTIMIZER = "use --optimizer muon"


@dataclass(kw_only=True)
class OptimizerSettings(OptimizerFlags, SettingsGroup):
    """Optimizer, weight decay, clipping, dropout, precision of optimizer state."""

    start_weight_decay: float = required()
    """Weight decay at the start, if it changes over time."""
    end_weight_decay: float = required()
    """Weight decay at the end, if it changes over time."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Shape of the change of weight decay."""
    no_weight_decay_cond_type: str | None = flag(None, choices=("apply_wd_to_qk_layernorm",))
    """Another spelling of --apply-wd-to-qk-layernorm."""
    param_rules: list[str] = flag([], nargs="+")
    """Settings of single parameters: words PATTERN:NAME=VALUE,... with a shell pattern for names of
    parameters and any of lr_mult, wd_mult, max_lr, min_lr, start_wd, end_wd, optimizer. A later
    word overrides an earlier one. Example: "*.mlp.*.weight:lr_mult=0.5,wd_mult=0"."""


@dataclass(kw_only=True)
class PrecisionSettings(
    HalfPrecision,
    PrecisionConfig,
    RecomputeConfig,
    ActivationOffloadConfig,
    GraphConfig,
    SettingsGroup,
):
    """Number formats, recomputation, offload, graphs, fusions."""

    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    bias_gelu_fusion: bool = flag(True, "--no-bias-gelu-fusion")
    """Compute bias and GELU in separate kernels."""
    bias_swiglu_fusion: bool = flag(True, "--no-bias-swiglu-fusion")
    """Compute bias and SwiGLU in separate kernels."""
    empty_unused_memory_level: int = flag(
        0, choices=(0, 1, 2), only_on_gpu="only GPU memory is cached"
    )
    """Release cached GPU memory: 1 before the update, 2 before and after the update."""
