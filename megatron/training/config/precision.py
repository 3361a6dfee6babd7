"""Flags of precision, activation memory and fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag

_USE_BF16 = "use --bf16"
_USE_RECOMPUTE = "use --recompute-granularity selective or full"


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats, recomputation, offload, graphs, fusions."""

    bf16: bool = False
    """Compute in bf16 with fp32 main weights."""
    fp16: bool = False
    """Compute in fp16 with loss scaling and fp32 main weights."""
    loss_scale: float | None = None
    """Constant loss scale of fp16; none given means a dynamic one."""
    initial_loss_scale: float = flag(2.0**32, part_of="fp16")
    """First dynamic loss scale."""
    min_loss_scale: float = flag(1.0, part_of="fp16")
    """Smallest dynamic loss scale."""
    loss_scale_window: float = flag(1000, part_of="fp16")
    """Good steps before the dynamic scale doubles."""
    hysteresis: int = flag(2, part_of="fp16")
    """Bad steps before it is halved."""
    on_loss_scale_floor: str = flag("warn", choices=("raise", "skip", "warn"), part_of="fp16")
    """What an overflow at the smallest loss scale does beside skipping the step: raise stops the
    run, skip says nothing, warn says what to change."""
    disable_bf16_reduced_precision_matmul: bool = False
    """Sum the parts of bf16 matrix products in fp32, on GPUs."""
    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""
    fp8: str | None = flag(None, "--fp8-format", choices=("e4m3", "hybrid"), refuse=_USE_BF16)
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
    fp8_param_gather: bool = flag(False, part_of="fp8")
    """Gather parameters in FP8."""
    first_last_layers_bf16: bool = flag(False, part_of="fp8")
    """Keep the first and last layers in bf16."""
    fp4: str | None = flag(None, "--fp4-format", choices=("e2m1",), refuse=_USE_BF16)
    """Compute matrix products in FP4."""
    fp4_recipe: str = flag("nvfp4", choices=("nvfp4", "custom"), part_of="fp4")
    """How FP4 tensors are scaled."""
    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Which activations are formed again in backward: whole layers, or parts of each."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """Full: groups of equal size (uniform) or the first layers of each chunk (block)."""
    recompute_num_layers: int | None = None
    """Layers of a group, or recomputed layers of a chunk."""
    recompute_modules: list[str] | None = flag(None, nargs="+")
    """Selective: any of core_attn, mlp, moe, layernorm. Default core_attn. Norms whose output is
    the residual stream (--apply-residual-connection-post-layernorm) keep it."""
    distribute_saved_activations: bool = False
    """Shard the saved layer inputs over the tensor-parallel ranks."""
    mlp_chunks_for_training: int = 1
    """Compute the MLP for so many runs of tokens one after the other, each again in backward: its
    wide activations exist for one run at a time (arXiv 2506.13996)."""
    cpu_offloading_num_layers: int = flag(0, refuse=_USE_RECOMPUTE)
    """Layers whose activations wait in host memory."""
    fine_grained_activation_offloading: bool = flag(False, refuse=_USE_RECOMPUTE)
    """Move activations of chosen modules to host memory."""
    offload_modules: list[str] = flag([], nargs="+", part_of="fine_grained_activation_offloading")
    """Those modules."""
    cuda_graph_impl: str = flag(
        "none",
        choices=("none", "local", "transformer_engine", "full_iteration"),
        refuse_values=dict.fromkeys(
            ("local", "transformer_engine", "full_iteration"), "use none: steps run eagerly"
        ),
    )
    """Capture the step as a CUDA graph."""
    cuda_graph_modules: list[str] = flag([], nargs="+", part_of="cuda_graph_impl")
    """What is captured."""
    gradient_accumulation_fusion: bool = flag(True, "--no-gradient-accumulation-fusion")
    """Form weight gradients apart and add them, instead of letting the product accumulate."""
    masked_softmax_fusion: bool = flag(
        True, "--no-masked-softmax-fusion", note="the unfused attention path has one form"
    )
    """Scale, mask and softmax one by one on the unfused attention path."""
    bias_gelu_fusion: bool = flag(True, "--no-bias-gelu-fusion")
    """Bias and GELU one by one."""
    bias_swiglu_fusion: bool = flag(True, "--no-bias-swiglu-fusion")
    """Bias and SwiGLU one by one."""
    bias_dropout_fusion: bool = flag(True, "--no-bias-dropout-fusion")
    """Bias, dropout and residual one by one."""
    apply_rope_fusion: bool = flag(
        True, "--no-rope-fusion", note="rotary embedding has one implementation"
    )
    """Rotary embedding from plain operations."""
    persist_layer_norm: bool = flag(True, note="the native norm is used in any case")
    """Leave out the persistent layer-norm kernel of apex."""
    cross_entropy_loss_fusion: bool = False
    """Compute head and cross entropy in chunks, so that full logits never exist."""
    cross_entropy_fusion_impl: str = flag(
        "native", choices=("native", "te"), refuse_values={"te": "use native"}
    )
    """Implementation of that fusion."""
    use_flash_attn: bool = flag(False, note="a flash kernel is chosen wherever one exists")
    """Older switch for flash attention."""
    te_rng_tracker: bool = flag(False, note="random draws are keyed and need no tracker")
    """Random number tracker of Transformer Engine."""
    deterministic_mode: bool = False
    """Use only algorithms that give equal bits in every run."""
    attention_softmax_in_fp32: bool = False
    """Compute the unfused softmax in fp32."""
    empty_unused_memory_level: int = flag(0, choices=(0, 1, 2))
    """Return cached device memory: 1 before, 2 also after the update."""
