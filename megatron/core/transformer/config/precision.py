"""Precision and fused kernels inside the layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag, no_flag


@dataclass
class PrecisionConfig:
    """Where fp32 is kept, and which elementwise chains are fused."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""
    disable_bf16_reduced_precision_matmul: bool = False
    """Forbid bf16 accumulation inside GEMMs on hardware that offers it."""
    bias_activation_fusion: bool = no_flag(True)
    """Fuse bias + activation of the MLP."""
    bias_dropout_fusion: bool = flag(
        True, "--no-bias-dropout-fusion", help="Bias, dropout and residual one by one."
    )
    """Fuse bias + dropout + residual."""
    masked_softmax_fusion: bool = flag(
        True,
        "--no-masked-softmax-fusion",
        help="Scale, mask and softmax one by one on the unfused attention path.",
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
