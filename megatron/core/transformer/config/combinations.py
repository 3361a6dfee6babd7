"""Fields of different groups that exclude each other or do not fit the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.utils import best_divisor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def combination_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of fields of different groups that exclude each other."""
    pattern = config.window_attn_skip_freq
    if isinstance(pattern, list) and (len(pattern) != config.num_layers or set(pattern) - {0, 1}):
        yield ConfigError(
            f"window_attn_skip_freq gives {len(pattern)} layers for a model of"
            f" {config.num_layers}.",
            rule="the pattern is one 0 or 1 per layer",
            flags=["--window-attn-skip-freq", "--num-layers"],
            fix="use a number N, or a list expression of the right length",
        )
    pattern_of_letters = config.hybrid_layer_pattern or ""
    if "E" in pattern_of_letters and config.num_moe_experts is None:
        yield ConfigError(
            f"hybrid_layer_pattern={pattern_of_letters!r} without experts.",
            rule="E is a layer of experts",
            flags=["--hybrid-layer-pattern", "--num-experts"],
            fix="set --num-experts, or write - in place of E",
        )
    if "+" in pattern_of_letters and not config.multi_latent_attention:
        yield ConfigError(
            f"hybrid_layer_pattern={pattern_of_letters!r} without latents.",
            rule="+ is attention with latents",
            flags=["--hybrid-layer-pattern", "--multi-latent-attention"],
            fix="set --multi-latent-attention, or write * in place of +",
        )
    later = pattern_of_letters.split("/")[1:]
    fitting = {config.mtp_num_layers} if len(set(later)) > 1 else {config.mtp_num_layers, 1}
    if later and (len(later) not in fitting or config.mtp_use_repeated_layer > len(fitting) - 1):
        yield ConfigError(
            f"hybrid_layer_pattern={pattern_of_letters!r} with mtp_num_layers="
            f"{config.mtp_num_layers}, mtp_use_repeated_layer={config.mtp_use_repeated_layer}.",
            rule="letters are given for every depth, or once for all of them; a layer that"
            " is used for all depths has one kind",
            flags=[
                "--hybrid-layer-pattern",
                "--mtp-num-layers",
                "--mtp-use-repeated-layer",
            ],
            fix=f"drop --mtp-use-repeated-layer and use --mtp-num-layers {len(later)}",
        )
    if pattern_of_letters and config.use_parallel_residual:
        yield ConfigError(
            "hybrid_layer_pattern with use_parallel_residual.",
            rule="a layer of one letter is either a mixer or an MLP, not both",
            flags=["--hybrid-layer-pattern", "--use-parallel-residual"],
            fix="drop --use-parallel-residual",
        )
    if config.cross_entropy_loss_fusion and config.final_logit_softcapping:
        yield ConfigError(
            "cross_entropy_loss_fusion with final_logit_softcapping.",
            rule="the fused loss computes its logits by one product, without a bound",
            flags=["--cross-entropy-loss-fusion", "--final-logit-softcapping"],
            fix="drop --cross-entropy-loss-fusion",
        )
    if config.attention_output_gate and config.multi_latent_attention:
        yield ConfigError(
            "attention_output_gate with multi-latent attention.",
            rule="the gate is a part of the projection to whole query heads",
            flags=["--attention-output-gate", "--multi-latent-attention"],
            fix="drop --attention-output-gate",
        )
    if config.rotary_base_local is not None and (
        config.multi_latent_attention or config.mtp_num_layers
    ):
        yield ConfigError(
            f"rotary_base_local={config.rotary_base_local} with multi-latent attention or"
            " multi-token prediction.",
            rule="only the layers of a plain decoder have positions by kind of layer",
            flags=["--rotary-base-local", "--multi-latent-attention", "--mtp-num-layers"],
            fix="drop --rotary-base-local",
        )


def split_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield an error for each size that cannot be split over the tensor-parallel ranks."""
    tp, width = config.tensor_model_parallel_size, config.ffn_hidden_size or 0
    if config.num_attention_heads % tp:
        yield ConfigError(
            f"num_attention_heads={config.num_attention_heads} cannot be split over"
            f" tensor-parallel size {tp}.",
            rule="each tensor-parallel rank owns a whole number of query heads",
            flags=["--num-attention-heads", "--tensor-model-parallel-size"],
            fix=f"use --tensor-model-parallel-size {best_divisor(config.num_attention_heads, tp)}",
        )
    groups = config.num_query_groups or 1
    if groups % tp and tp % groups:
        yield ConfigError(
            f"num_query_groups={groups} does not fit tensor-parallel size {tp}.",
            rule="one of the two divides the other: ranks own whole key/value heads, or share one",
            flags=["--num-query-groups", "--tensor-model-parallel-size"],
            fix=f"use --tensor-model-parallel-size {best_divisor(groups, tp)}",
        )
    if width % tp:
        yield ConfigError(
            f"ffn_hidden_size={width} cannot be split over tensor-parallel size {tp}.",
            rule="each tensor-parallel rank owns an equal part of the MLP",
            flags=["--ffn-hidden-size", "--tensor-model-parallel-size"],
            fix=f"use --ffn-hidden-size {-(-width // tp) * tp}",
        )
