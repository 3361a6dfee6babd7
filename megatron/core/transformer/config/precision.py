"""Precision and fused kernels inside the layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag, no_flag

_SHARED_SCALES = "the ranks that share a scale are the same for all micro batches"


@dataclass
class PrecisionConfig:
    """Where fp32 is kept, and which elementwise chains are fused."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32."""
    fp8: str | None = flag(
        None, "--fp8-format", choices=("e4m3", "hybrid"), per_micro_batch=_SHARED_SCALES
    )
    """Multiply operands of 8 bits in the linear layers of the transformer layers: all in E4M3, or
    gradients in E5M2 ("hybrid"). See docs/low_precision.md."""
    fp8_recipe: str = flag(
        "delayed",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        refuse_values={"custom": "use --fp8-recipe delayed, tensorwise, blockwise or mxfp8"},
        part_of="fp8",
    )
    """How operands of 8 bits are scaled: by the largest magnitude of earlier steps (delayed) or of
    the tensor itself (tensorwise), by blocks of 128 (blockwise) or of 32 (mxfp8)."""
    fp8_margin: int = flag(0, part_of="fp8")
    """Powers of two left free above the largest magnitude of earlier steps, for delayed."""
    fp8_amax_history_len: int = flag(1, part_of="fp8")
    """Steps of the amax history, for delayed."""
    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"), part_of="fp8")
    """Which amax of the history scales: the last or the largest, for delayed."""
    fp8_wgrad: bool = flag(
        True, "--no-fp8-wgrad", help="Compute weight gradients in the dtype of the model."
    )
    """Compute weight gradients from low-precision operands too, not only outputs and input
    gradients."""
    fp4: str | None = flag(None, "--fp4-format", choices=("e2m1",), per_micro_batch=_SHARED_SCALES)
    """Multiply operands of 4 bits in the linear layers of the transformer layers."""
    fp4_recipe: str = flag(
        "nvfp4",
        choices=("nvfp4", "custom"),
        refuse_values={"custom": "use --fp4-recipe nvfp4"},
        part_of="fp4",
    )
    """How operands of 4 bits are scaled."""
    first_last_layers_bf16: bool = False
    """Keep the first and last layers in the dtype of the model."""
    num_layers_at_start_in_bf16: int = flag(1, part_of="first_last_layers_bf16")
    """How many first layers."""
    num_layers_at_end_in_bf16: int = flag(1, part_of="first_last_layers_bf16")
    """How many last layers."""
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

    def check_low_precision(self, mlp_chunks: int) -> list[MegatronError]:
        """Return problems of the low-precision settings."""
        problems: list[MegatronError] = []
        if self.fp8 and self.fp4:
            problems.append(
                ConfigError(
                    f"fp8={self.fp8!r} and fp4={self.fp4!r}.",
                    rule="the operands of a product have one number of bits",
                    flags=["--fp8-format", "--fp4-format"],
                    fix="drop one of them",
                )
            )
        if (self.fp8 or self.fp4) and mlp_chunks > 1:
            problems.append(
                ConfigError(
                    f"mlp_chunks_for_training={mlp_chunks} with low-precision products.",
                    rule="blocks and scales of weight gradients are made of all tokens of a micro"
                    " batch",
                    flags=["--mlp-chunks-for-training", "--fp8-format", "--fp4-format"],
                    fix="drop --mlp-chunks-for-training",
                )
            )
        counts = {
            "fp8_amax_history_len": (self.fp8_amax_history_len, 1),
            "num_layers_at_start_in_bf16": (self.num_layers_at_start_in_bf16, 0),
            "num_layers_at_end_in_bf16": (self.num_layers_at_end_in_bf16, 0),
        }
        problems += [
            ConfigError(
                f"{name}={count}.",
                rule=f"it is at least {least}",
                flags=["--" + name.replace("_", "-")],
                fix=f"use {least}",
            )
            for name, (count, least) in counts.items()
            if count < least
        ]
        return problems
