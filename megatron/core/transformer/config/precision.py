"""Number formats, fused kernels, recomputed and offloaded activations, and captured graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag, no_flag
from megatron.core.transformer.config.field_values import NOT_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_SHARED_SCALES = "the ranks that share a scale are the same for all micro batches"


@dataclass
class PrecisionConfig:
    """Formats of activations and products, and fused elementwise operations."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""
    fp8: str | None = flag(
        None, "--fp8-format", choices=("e4m3", "hybrid"), per_micro_batch=_SHARED_SCALES
    )
    """Multiply FP8 operands in the linear layers of the transformer layers: all in E4M3, or with
    gradients in E5M2 ("hybrid"). See docs/low_precision.md."""
    fp8_recipe: str = flag(
        "delayed",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        refuse_values={"custom": "use --fp8-recipe delayed, tensorwise, blockwise or mxfp8"},
        part_of="fp8",
    )
    """Scaling of FP8 operands: by the largest magnitude of earlier steps (delayed) or of the tensor
    itself (tensorwise), or in blocks of 128 (blockwise) or 32 elements (mxfp8)."""
    fp8_margin: int = flag(0, part_of="fp8")
    """Delayed scaling: spare powers of two above the largest magnitude of earlier steps."""
    fp8_amax_history_len: int = flag(1, part_of="fp8", within=POSITIVE)
    """Delayed scaling: number of steps in the amax history."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"), part_of="fp8")
    """Delayed scaling: use the most recent or the largest amax of the history."""
    fp8_wgrad: bool = flag(
        True, "--no-fp8-wgrad", help="Compute weight gradients in the dtype of the model."
    )
    """Compute weight gradients from low-precision operands too, not only outputs and input
    gradients."""
    fp4: str | None = flag(None, "--fp4-format", choices=("e2m1",), per_micro_batch=_SHARED_SCALES)
    """Multiply FP4 operands in the linear layers of the transformer layers."""
    fp4_recipe: str = flag(
        "nvfp4",
        choices=("nvfp4", "custom"),
        refuse_values={"custom": "use --fp4-recipe nvfp4"},
        part_of="fp4",
    )
    """Scaling of FP4 operands."""
    first_last_layers_bf16: bool = False
    """Keep the first and last layers in the dtype of the model."""
    num_layers_at_start_in_bf16: int = flag(
        1, part_of="first_last_layers_bf16", within=NOT_NEGATIVE
    )
    """Number of first layers."""
    num_layers_at_end_in_bf16: int = flag(1, part_of="first_last_layers_bf16", within=NOT_NEGATIVE)
    """Number of last layers."""
    disable_bf16_reduced_precision_matmul: bool = False
    """Forbid bf16 accumulation inside GEMMs on hardware that offers it."""
    bias_activation_fusion: bool = no_flag(True)
    """Fuse bias + activation of the MLP."""
    bias_dropout_fusion: bool = flag(
        True, "--no-bias-dropout-fusion", help="Compute bias, dropout and residual one by one."
    )
    """Fuse bias + dropout + residual."""
    masked_softmax_fusion: bool = flag(
        True,
        "--no-masked-softmax-fusion",
        help="Compute scale, mask and softmax one by one on the unfused attention path.",
        note="the unfused attention path has one form",
    )
    """Fuse scale + mask + softmax on the unfused attention path."""
    cross_entropy_loss_fusion: bool = False
    """Fuse the output head with the cross entropy so that full logits are never kept."""
    cross_entropy_fusion_impl: str = flag(
        "native", choices=("native", "te"), part_of="cross_entropy_loss_fusion"
    )
    """Implementation of the fused cross entropy; te is Transformer Engine's, on GPUs."""
    persist_layer_norm: bool = flag(
        False,
        cli_default=True,
        help="Leave out the persistent layer-norm kernel of apex.",
        note="the native norm is used in any case",
    )
    """Accepted for compatibility; the native norm is used."""
    memory_efficient_layer_norm: bool = no_flag(False)
    """Accepted for compatibility; the native norm is used."""


def precision_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of the low-precision settings."""
    mlp_chunks = config.mlp_chunks_for_training
    if config.fp8 and config.fp4:
        yield ConfigError(
            f"fp8={config.fp8!r} and fp4={config.fp4!r}.",
            rule="both operands of a product have the same format",
            flags=["--fp8-format", "--fp4-format"],
            fix="drop one of them",
        )
    if (config.fp8 or config.fp4) and mlp_chunks > 1:
        yield ConfigError(
            f"mlp_chunks_for_training={mlp_chunks} with low-precision products.",
            rule="blocks and scales of weight gradients cover all tokens of a micro batch",
            flags=["--mlp-chunks-for-training", "--fp8-format", "--fp4-format"],
            fix="drop --mlp-chunks-for-training",
        )


RECOMPUTE_MODULES = (
    "core_attn", "mla_up_proj", "mlp", "layernorm", "moe", "moe_act", "shared_experts",
)  # fmt: skip
"""Parts of a layer that selective recomputation can drop and recompute."""


@dataclass
class RecomputeConfig:
    """Activations that are dropped after forward and recomputed in backward."""

    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Recompute activations in backward: of whole layers ("full"), or of parts ("selective")."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """For "full": "uniform" (groups of layers) or "block" (the first layers of each chunk)."""
    recompute_num_layers: int | None = None
    """uniform: layers of a group; block: recomputed layers of a chunk."""
    recompute_modules: list[str] | None = flag(None, nargs="+")
    """Selective: any of core_attn, mla_up_proj (queries, keys and values of latents), mlp, moe,
    moe_act (the input of an expert's second layer), shared_experts, layernorm. Default core_attn.
    layernorm skips norms whose output is the residual stream
    (--apply-residual-connection-post-layernorm)."""
    distribute_saved_activations: bool = False
    """Shard the saved layer inputs over the tensor-parallel ranks."""
    mlp_chunks_for_training: int = flag(1, within=POSITIVE)
    """Number of token chunks of the MLP. Chunks are computed one after the other and recomputed in
    backward, so only one chunk's wide activations exist at a time (tiled MLP: arXiv 2506.13996,
    section 3.1)."""

    def recomputes(self, module: str) -> bool:
        """Return whether selective recomputation includes this part of a layer."""
        modules = self.recompute_modules or []
        return self.recompute_granularity == "selective" and module in modules


def recompute_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of the recompute settings."""
    sequence_parallel = config.sequence_parallel
    has_latents = config.multi_latent_attention
    overlaps_shared_expert = config.moe_shared_expert_overlap
    granularity, method = config.recompute_granularity, config.recompute_method
    if granularity == "full" and (
        method not in ("uniform", "block") or not config.recompute_num_layers
    ):
        yield ConfigError(
            f"full recomputation with method={method} and"
            f" num_layers={config.recompute_num_layers}.",
            rule="it needs a method and a positive number of layers",
            flags=["--recompute-method", "--recompute-num-layers"],
            fix="add --recompute-method uniform --recompute-num-layers 1",
        )
    if granularity != "full" and method is not None:
        yield ConfigError(
            f"recompute_method={method!r} with recompute_granularity={granularity!r}.",
            rule="a method belongs to full recomputation",
            flags=["--recompute-method", "--recompute-granularity"],
            fix="use --recompute-granularity full or drop --recompute-method",
        )
    unknown = set(config.recompute_modules or []) - set(RECOMPUTE_MODULES)
    if unknown:
        yield ConfigError(
            f"recompute_modules names {sorted(unknown)}.",
            rule=f"selective recomputation supports {', '.join(RECOMPUTE_MODULES)}",
            flags=["--recompute-modules"],
            fix="use --recompute-modules core_attn",
        )
    if config.recomputes("mla_up_proj") and not has_latents:
        yield ConfigError(
            "recompute_modules names mla_up_proj.",
            rule="only multi-latent attention projects up from latents",
            flags=["--recompute-modules", "--multi-latent-attention"],
            fix="drop mla_up_proj",
        )
    if config.recomputes("shared_experts") and overlaps_shared_expert:
        yield ConfigError(
            "recompute_modules names shared_experts together with moe_shared_expert_overlap.",
            rule="an overlapped shared expert runs in parts, which cannot be recomputed together",
            flags=["--recompute-modules", "--moe-shared-expert-overlap"],
            fix="drop one of the two",
        )
    if config.distribute_saved_activations and sequence_parallel:
        yield ConfigError(
            "distribute_saved_activations is on together with sequence_parallel.",
            rule="under sequence parallelism layer inputs are sharded already",
            flags=["--distribute-saved-activations", "--sequence-parallel"],
            fix="drop --distribute-saved-activations",
        )


def derive_recompute(config: RecomputeConfig) -> None:
    """Fill the default module list."""
    if config.recompute_granularity == "selective" and config.recompute_modules is None:
        config.recompute_modules = ["core_attn"]


OFFLOAD_MODULES = (
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
)  # fmt: skip
"""Parts of a layer whose saved activations can be offloaded."""
DROPPED_BY = {
    "core_attn": ("core_attn", "mla_up_proj"),
    "qkv_linear": ("layernorm",),
    "moe_act": ("moe_act", "moe"),
    "expert_fc1": ("moe",),
}
"""Part of a layer -> recomputed parts whose recomputation frees all its saved activations."""


@dataclass
class ActivationOffloadConfig:
    """Activations that are copied to host memory after forward and back before backward."""

    fine_grained_activation_offloading: bool = False
    """Keep the saved activations of --offload-modules in host memory until backward needs them;
    copies overlap with computation."""
    offload_modules: list[str] | None = flag(
        None, nargs="+", cli_default=[], part_of="fine_grained_activation_offloading"
    )
    """Any of attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act. Recomputed
    activations are not saved, so they are not offloaded."""
    min_offloaded_tensor_size: int = flag(
        1024 * 1024,
        part_of=("fine_grained_activation_offloading", "cpu_offloading_num_layers"),
    )
    """Smallest number of elements of an offloaded tensor; smaller tensors stay on the device."""
    cpu_offloading_num_layers: int = 0
    """Number of layers at the start of each chunk whose activations are all offloaded. No effect
    with --overlap-moe-expert-parallel-comm, where layers of two micro batches alternate."""

    @property
    def modules_to_offload(self) -> Collection[str]:
        """The parts of layers to offload; empty without fine-grained offloading."""
        return (self.offload_modules or []) if self.fine_grained_activation_offloading else []

    @property
    def offloads_activations(self) -> bool:
        """Whether any activations are offloaded."""
        return self.fine_grained_activation_offloading or self.cpu_offloading_num_layers > 0


def activation_offload_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of these settings."""
    granularity = config.recompute_granularity
    recomputed = config.recompute_modules or ()
    modules = config.modules_to_offload
    unknown = set(modules) - set(OFFLOAD_MODULES)
    if config.fine_grained_activation_offloading and (not modules or unknown):
        yield ConfigError(
            f"fine_grained_activation_offloading with offload_modules={modules}.",
            rule=f"offload_modules names parts of a layer: {', '.join(OFFLOAD_MODULES)}",
            flags=["--fine-grained-activation-offloading", "--offload-modules"],
            fix="use --offload-modules core_attn attn_proj",
        )
    if config.fine_grained_activation_offloading and config.cpu_offloading_num_layers:
        yield ConfigError(
            "fine_grained_activation_offloading with"
            f" cpu_offloading_num_layers={config.cpu_offloading_num_layers}.",
            rule="either whole layers are offloaded, or parts of all layers",
            flags=["--fine-grained-activation-offloading", "--cpu-offloading-num-layers"],
            fix="drop one of the two",
        )
    dropped = {"layernorm", "moe_act", "mla_up_proj"} & set(recomputed)
    if config.cpu_offloading_num_layers and granularity == "selective" and dropped:
        yield ConfigError(
            f"cpu_offloading_num_layers={config.cpu_offloading_num_layers} with recomputation"
            f" of {', '.join(sorted(dropped))}.",
            rule="outputs that are dropped after use cannot be copied",
            flags=["--cpu-offloading-num-layers", "--recompute-modules"],
            fix="use --fine-grained-activation-offloading for the other parts",
        )


_ON_CPUS = "there are no graphs on CPUs, and steps run eagerly"


@dataclass
class GraphConfig:
    """CUDA graphs of layers. Names and defaults are Megatron's."""

    cuda_graph_impl: str = flag(
        "none",
        choices=("none", "local", "transformer_engine", "full_iteration"),
        only_on_gpu=_ON_CPUS,
        note_values={"full_iteration": "micro batches are not in static buffers; no graph is made"},
    )
    """Start the kernels of each dense layer by CUDA graphs, one for each micro batch in flight:
    local, or transformer_engine with the same effect. The log names layers that cannot use it."""
    enable_cuda_graph: bool = flag(False, only_on_gpu=_ON_CPUS)
    """Megatron's earlier name of cuda-graph-impl local."""
    cuda_graph_warmup_steps: int = flag(3, part_of="cuda_graph_impl", within=NOT_NEGATIVE)
    """Passes of a layer before each capture. 0 still makes one, which initialises libraries."""

    @property
    def captures_layers(self) -> bool:
        """Whether layers run as graphs."""
        return self.enable_cuda_graph or self.cuda_graph_impl in ("local", "transformer_engine")


def graph_problems(config: GraphConfig) -> Iterator[MegatronError]:
    """Yield the problems of these settings."""
    here = device.device_type()
    if config.captures_layers and here != "cpu" and not device.records_graphs():
        yield ConfigError(
            f"torch {torch.__version__} records no graphs on {here}.",
            rule="layers are captured by torch.accelerator.Graph, or on CUDA by CUDAGraph",
            flags=["--cuda-graph-impl", "--enable-cuda-graph"],
            fix="leave out --cuda-graph-impl, or install a torch that has torch.accelerator.Graph",
        )
