"""Flags of precision, activation memory and fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.settings.flags import SettingsGroup, flag
from megatron.core.transformer.config.activation_offload import ActivationOffloadConfig
from megatron.core.transformer.config.captured_graphs import GraphConfig
from megatron.core.transformer.config.precision import PrecisionConfig
from megatron.core.transformer.config.recompute import RecomputeConfig


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
    """Bias and GELU one by one."""
    bias_swiglu_fusion: bool = flag(True, "--no-bias-swiglu-fusion")
    """Bias and SwiGLU one by one."""
    empty_unused_memory_level: int = flag(
        0, choices=(0, 1, 2), only_on_gpu="only memory of a device is kept for the next tensors"
    )
    """Return cached device memory: 1 before, 2 also after the update."""
