"""Flags of precision, activation memory and fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.settings.flags import SettingsGroup, flag
from megatron.core.transformer.config.precision import PrecisionConfig
from megatron.core.transformer.config.recompute import RecomputeConfig

_ON_DEVICE = "activations stay on the device; --recompute-granularity saves memory"


@dataclass(kw_only=True)
class PrecisionSettings(HalfPrecision, PrecisionConfig, RecomputeConfig, SettingsGroup):
    """Number formats, recomputation, offload, graphs, fusions."""

    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    cpu_offloading_num_layers: int = flag(0, note=_ON_DEVICE)
    """Layers whose activations wait in host memory."""
    fine_grained_activation_offloading: bool = flag(False, note=_ON_DEVICE)
    """Move activations of chosen modules to host memory."""
    offload_modules: list[str] = flag([], nargs="+", part_of="fine_grained_activation_offloading")
    """Those modules."""
    bias_gelu_fusion: bool = flag(True, "--no-bias-gelu-fusion")
    """Bias and GELU one by one."""
    bias_swiglu_fusion: bool = flag(True, "--no-bias-swiglu-fusion")
    """Bias and SwiGLU one by one."""
    use_flash_attn: bool = flag(False, note="a flash kernel is chosen wherever one exists")
    """Older switch for flash attention."""
    te_rng_tracker: bool = flag(False, note="random draws are keyed and need no tracker")
    """Random number tracker of Transformer Engine."""
    empty_unused_memory_level: int = flag(
        0, choices=(0, 1, 2), only_on_gpu="only memory of a device is kept for the next tensors"
    )
    """Return cached device memory: 1 before, 2 also after the update."""
