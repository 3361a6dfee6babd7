"""Settings of an image encoder, and the config of its layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch.nn.functional as F

from megatron.core.activations import fast_gelu
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.field_types import check_types
from megatron.core.settings.flags import flag
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class VisionKind:
    """Architecture of an image encoder; see `KINDS`."""

    normalization: str
    is_gated: bool
    has_patch_bias: bool
    """The patch embedding has a bias."""
    has_windows: bool
    """Most layers attend within windows of a frame."""
    has_position_table: bool
    """A square table of learned positions is resampled to the size of each image."""
    adds_to_layers: bool
    """DeepStack: outputs of several encoder layers are added after the first decoder layers."""


KINDS = {
    "qwen2_5_vl": VisionKind(
        normalization="RMSNorm",
        is_gated=True,
        has_patch_bias=False,
        has_windows=True,
        has_position_table=False,
        adds_to_layers=False,
    ),
    "qwen3_vl": VisionKind(
        normalization="LayerNorm",
        is_gated=False,
        has_patch_bias=True,
        has_windows=False,
        has_position_table=True,
        adds_to_layers=True,
    ),
}
"""S. Bai et al., "Qwen2.5-VL Technical Report", section 2.1.1, arXiv 2502.13923; "Qwen3-VL
Technical Report", section 2, arXiv 2511.21631."""


@dataclass(kw_only=True)
class VisionConfig:
    """Sizes of the image encoder, and the token that its output replaces."""

    vision_model_type: str = flag("qwen2_5_vl", choices=tuple(KINDS))
    """Image encoder: qwen2_5_vl has windows, a gated MLP and RMSNorm; qwen3_vl has a table of
    positions, LayerNorm and DeepStack."""
    vision_num_layers: int = 32
    """Layers of the image encoder."""
    vision_hidden_size: int = 1280
    """Hidden size of the image encoder."""
    vision_num_attention_heads: int = 16
    """Attention heads of the image encoder."""
    vision_ffn_hidden_size: int = 3420
    """Hidden size of the MLPs of the image encoder."""
    num_channels: int = 3
    """Channels of an image."""
    patch_dim: int = 16
    """Side of a patch in pixels."""
    temporal_patch_size: int = 2
    """Frames of a patch; a still image is repeated to this number of frames."""
    spatial_merge_size: int = 2
    """Side of a block in patches; each block becomes one token."""
    vision_window_size: int = 112
    """Side in pixels of the attention windows in most layers of qwen2_5_vl."""
    vision_full_attention_layers: list[int] | None = flag(None, nargs="*")
    """Layers of qwen2_5_vl, counted from 0, that attend to the whole frame. Default: every eighth
    layer and the last one."""
    vision_num_position_embeddings: int = 2304
    """Positions in the table of qwen3_vl, a square number."""
    deepstack_layers: list[int] | None = flag(None, nargs="*")
    """Layers of qwen3_vl, counted from 0, whose outputs are added to the image tokens after the
    first layers of the language model, one output per layer (L. Meng et al., "DeepStack", arXiv
    2406.04334). Without it no outputs are added."""
    image_token_id: int | None = None
    """Token id that the block embeddings of an image replace."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def kind(self) -> VisionKind:
        """Architecture of the encoder."""
        return KINDS[self.vision_model_type]

    @property
    def full_attention_layers(self) -> list[int]:
        """The layers, from 0, that attend to whole frames."""
        count, given = self.vision_num_layers, self.vision_full_attention_layers
        if not self.kind.has_windows:
            return list(range(count))
        if given is not None:
            return list(given)
        return sorted({*range(7, count, 8), count - 1})

    @property
    def layers_added(self) -> list[int]:
        """The layers, from 0, whose outputs are added in the decoder."""
        return list(self.deepstack_layers or ()) if self.kind.adds_to_layers else []

    @property
    def window_blocks(self) -> int:
        """Side of a window in blocks."""
        return self.vision_window_size // (self.patch_dim * self.spatial_merge_size)

    @property
    def positions_side(self) -> int:
        """Side of the table of positions."""
        return int(self.vision_num_position_embeddings**0.5)

    @property
    def merged_size(self) -> int:
        """Width of the concatenated patches of a block."""
        return self.vision_hidden_size * self.spatial_merge_size**2

    def num_parameters(self, output_size: int) -> int:
        """Return the number of parameters of encoder and projectors.

        Args:
            output_size: hidden size of the language model.
        """
        kind, h, merged = self.kind, self.vision_hidden_size, self.merged_size
        ffn = self.vision_ffn_hidden_size
        of_norm = 1 if kind.normalization == "RMSNorm" else 2
        patch = self.num_channels * self.temporal_patch_size * self.patch_dim**2
        count = h * (patch + kind.has_patch_bias)
        count += kind.has_position_table * self.vision_num_position_embeddings * h
        mlp = (1 + kind.is_gated) * ffn * (h + 1) + h * (ffn + 1)
        count += self.vision_num_layers * (4 * h * (h + 1) + mlp + 2 * of_norm * h)
        merger = merged * (merged + 1) + output_size * (merged + 1)
        count += merger + of_norm * h
        return count + len(self.layers_added) * (merger + of_norm * merged)

    def problems(self, tensor_parallel_size: int) -> list[MegatronError]:
        """Return the errors of these settings."""
        return [
            ConfigError(found, rule=rule, flags=flags, fix=fix)
            for is_wrong, found, rule, flags, fix in self._checks(tensor_parallel_size)
            if is_wrong
        ]

    def _checks(self, tp: int) -> list[tuple[bool, str, str, list[str], str]]:
        heads, hidden, layers = (
            self.vision_num_attention_heads,
            self.vision_hidden_size,
            self.vision_num_layers,
        )
        side = self.patch_dim * self.spatial_merge_size
        named = self.full_attention_layers + self.layers_added
        smallest = min(
            hidden,
            heads,
            layers,
            self.vision_ffn_hidden_size,
            side,
            self.num_channels,
            self.temporal_patch_size,
        )
        return [
            (
                smallest < 1,
                "a size of the image encoder is not positive.",
                "layers, heads, widths, channels and patches are at least 1",
                ["--vision-num-layers", "--vision-hidden-size", "--patch-dim"],
                "give positive sizes",
            ),
            (
                smallest > 0 and (hidden % heads > 0 or hidden // heads % 4 > 0),
                f"--vision-hidden-size {hidden} with {heads} heads.",
                "the channels of a head rotate in pairs: half of the pairs by the patch's vertical"
                " position, half by its horizontal position",
                ["--vision-hidden-size", "--vision-num-attention-heads"],
                f"use --vision-hidden-size {max(1, hidden // max(1, 4 * heads)) * 4 * heads}",
            ),
            (
                heads % tp > 0 or self.vision_ffn_hidden_size % tp > 0 or self.merged_size % tp > 0,
                f"{heads} heads and an MLP of {self.vision_ffn_hidden_size} in the image encoder"
                f" with tensor-parallel size {tp}.",
                "each tensor-parallel rank owns whole heads and an equal part of the MLP",
                [
                    "--vision-num-attention-heads",
                    "--vision-ffn-hidden-size",
                    "--tensor-model-parallel-size",
                ],
                "use a tensor-parallel size that divides both",
            ),
            (
                self.kind.has_windows
                and (side < 1 or self.vision_window_size % side > 0 or not self.window_blocks),
                f"--vision-window-size {self.vision_window_size} with blocks of {side} pixels.",
                "a window is a whole number of blocks of patches wide",
                ["--vision-window-size", "--patch-dim", "--spatial-merge-size"],
                f"use --vision-window-size {4 * side}",
            ),
            (
                any(not 0 <= layer < layers for layer in named),
                f"layers {named} of an image encoder with {layers} layers.",
                "layers are counted from 0",
                ["--vision-full-attention-layers", "--deepstack-layers", "--vision-num-layers"],
                f"name layers between 0 and {layers - 1}",
            ),
            (
                len(set(self.layers_added)) < len(self.layers_added)
                or self.layers_added != sorted(self.layers_added),
                f"--deepstack-layers {self.layers_added}.",
                "each layer is named once, in ascending order",
                ["--deepstack-layers"],
                "sort them",
            ),
            (
                self.kind.has_position_table
                and self.positions_side**2 != self.vision_num_position_embeddings,
                f"--vision-num-position-embeddings {self.vision_num_position_embeddings}.",
                "positions of images are learned for a square",
                ["--vision-num-position-embeddings"],
                f"use {self.positions_side**2}",
            ),
            (
                self.image_token_id is None,
                "there is no token for images.",
                "the encoder's output replaces the embeddings of one token id",
                ["--image-token-id"],
                "give the id of a token that is not used in text, for example <|image_pad|>",
            ),
        ]

    def layer_config(self, config: TransformerConfig) -> TransformerConfig:
        """Return the config of the encoder's layers, which are all on the first stage.

        Tensor-parallel ranks split heads and MLPs; there is no sequence parallelism, because the
        number of patches depends on the images.

        Args:
            config: config of the language model.
        """
        kind = self.kind
        plain: dict[str, Any] = {
            f.name: f.default for f in fields(TransformerConfig) if f.name in _OF_LANGUAGE
        }
        return replace(
            config,
            **plain,
            num_layers=self.vision_num_layers,
            hidden_size=self.vision_hidden_size,
            ffn_hidden_size=self.vision_ffn_hidden_size,
            num_attention_heads=self.vision_num_attention_heads,
            num_query_groups=self.vision_num_attention_heads,
            kv_channels=None,
            normalization=kind.normalization,
            layernorm_epsilon=1e-6,
            gated_linear_unit=kind.is_gated,
            activation_func=F.silu if kind.is_gated else fast_gelu,
            add_bias_linear=True,
            add_qkv_bias=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            sequence_parallel=False,
            pipeline_model_parallel_size=1,
            context_parallel_size=1,
            fp32_residual_connection=False,
            init_method=None,
            output_layer_init_method=None,
            embedding_init_method=None,
        )


_OF_LANGUAGE = frozenset({
    "encoder_num_layers", "softmax_scale", "softmax_type", "window_size", "window_attn_skip_freq",
    "qk_layernorm", "qk_layernorm_across_heads", "qk_layernorm_after_rope", "reordered_norm",
    "softmax_scale_local", "query_scale_beta", "rotary_short_factors", "rotary_long_factors",
    "rotary_amplitude", "share_parallel_norm", "attention_output_gate", "no_rope_freq",
    "attention_gate_by_head", "attention_gate_activation", "activation_func_clamp_after",
    "mlp_factors",
    "rotary_base_local",
    "rotary_interleaved", "mrope_section", "mrope_interleaved", "sandwich_norm",
    "use_parallel_residual", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    "enable_mhc_connections", "altup_num_inputs", "laurel_rank", "activation_sparsity",
    "attn_logit_softcapping", "final_logit_softcapping", "unpadded_vocab_size", "glu_linear_offset",
    "activation_func_clamp_value", "apply_residual_connection_post_layernorm",
    "layernorm_zero_centered_gamma", "apply_query_key_layer_scaling", "num_moe_experts",
    "experimental_attention_variant", "linear_attention_freq", "moe_layer_freq",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "fine_grained_activation_offloading", "offload_modules", "cpu_offloading_num_layers",
    "cp_comm_type", "hierarchical_context_parallel_sizes", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json", "attention_chunk_size", "qk_l2_norm",
    "v_l2_norm", "attention_k_eq_v", "num_kv_shared_layers", "layer_scalar", "per_layer_embed_dim",
    "rotary_proportional", "scalable_softmax",
    "v_channels", "attention_value_scale", "query_scale_interval", "query_scale_without_rope",
})  # fmt: skip
"""Fields for the language model only: the encoder's layers have the defaults."""

__all__ = ["KINDS", "VisionConfig", "VisionKind"]
