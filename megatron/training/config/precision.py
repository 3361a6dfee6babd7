"""Flags of precision, activation memory and fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.settings.flags import SettingsGroup, flag
from megatron.core.transformer.config.precision import PrecisionConfig
from megatron.core.transformer.config.recompute import RecomputeConfig

_IN_MODEL_DTYPE = "matrix products are computed in the dtype of the model, which is more precise"
_ON_DEVICE = "activations stay on the device; --recompute-granularity saves memory"


@dataclass(kw_only=True)
class PrecisionSettings(HalfPrecision, PrecisionConfig, RecomputeConfig, SettingsGroup):
    """Number formats, recomputation, offload, graphs, fusions."""

    fp8: str | None = flag(None, "--fp8-format", choices=("e4m3", "hybrid"), note=_IN_MODEL_DTYPE)
    """Compute matrix products in FP8, in this format."""
    fp8_recipe: str = flag(
        "delayed",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        part_of="fp8",
    )
    """How FP8 tensors are scaled."""
    fp8_amax_history_len: int = flag(1, part_of="fp8")
    """Steps of the amax history."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"), part_of="fp8")
    """How the scale follows from that history."""
    first_last_layers_bf16: bool = flag(False, part_of="fp8")
    """Keep the first and last layers in bf16."""
    fp4: str | None = flag(None, "--fp4-format", choices=("e2m1",), note=_IN_MODEL_DTYPE)
    """Compute matrix products in FP4."""
    fp4_recipe: str = flag("nvfp4", choices=("nvfp4", "custom"), part_of="fp4")
    """How FP4 tensors are scaled."""
    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    cpu_offloading_num_layers: int = flag(0, note=_ON_DEVICE)
    """Layers whose activations wait in host memory."""
    fine_grained_activation_offloading: bool = flag(False, note=_ON_DEVICE)
    """Move activations of chosen modules to host memory."""
    offload_modules: list[str] = flag([], nargs="+", part_of="fine_grained_activation_offloading")
    """Those modules."""
    cuda_graph_impl: str = flag(
        "none",
        choices=("none", "local", "transformer_engine", "full_iteration"),
        note="steps run eagerly, and no CUDA graph is captured",
    )
    """Capture the step as a CUDA graph."""
    cuda_graph_modules: list[str] = flag([], nargs="+", part_of="cuda_graph_impl")
    """What is captured."""
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
