"""Read the settings in a checkpoint, for --use-checkpoint-args."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection

from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport.object_collectives import SingleProcess
from megatron.training.checkpointing.selection import select_checkpoints
from megatron.training.config.run import RunConfig, all_flags

MODEL_SHAPE_ARGS = (
    "num_layers", "encoder_num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "kv_channels", "num_query_groups", "decoder_seq_length", "relative_attention_num_buckets",
    "relative_attention_max_distance", "scale_t5_logits",
    "group_query_attention", "seq_length", "max_position_embeddings",
    "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved",
    "use_rotary_position_embeddings", "use_rope_scaling", "rope_scaling_factor",
    "add_position_embedding", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "qk_layernorm_across_heads", "qk_layernorm_after_rope", "reordered_norm",
    "softmax_scale_local", "query_scale_beta", "rotary_short_factors", "rotary_long_factors",
    "rotary_amplitude", "share_parallel_norm",
    "attention_gate_by_head", "attention_gate_activation", "activation_func_clamp_after",
    "attention_output_gate", "mla_gate_by_channel", "swiglu", "squared_relu", "relu",
    "xielu", "embed_layernorm",
    "normalization", "norm_epsilon", "apply_layernorm_1p", "untie_embeddings_and_output_weights",
    "make_vocab_size_divisible_by", "unpadded_vocab_size", "tokenizer_type", "tokenizer_model",
    "vocab_size", "vocab_file", "merge_file", "tokenizer_hf_no_include_special_tokens",
    "window_size", "window_attn_skip_freq", "rotary_base_local", "geglu",
    "sandwich_norm", "use_parallel_residual", "embedding_multiplier", "softmax_scale",
    "residual_multiplier", "logits_scaling", "enable_mhc_connections", "mhc_num_residual_streams",
    "mhc_sinkhorn_iterations", "mhc_epsilon", "mhc_post_magnitude", "mhc_learned_contraction",
    "heterogeneous_layers_config_encoded_json", "attention_chunk_size", "qk_l2_norm",
    "v_channels", "attention_value_scale", "v_l2_norm", "attention_k_eq_v", "num_kv_shared_layers",
    "layer_scalar", "per_layer_embed_dim", "per_layer_vocab_size", "rotary_proportional",
    "altup_num_inputs", "altup_active_idx", "altup_coef_clip", "laurel_rank", "activation_sparsity",
    "query_scale_interval", "query_scale_without_rope", "moe_apply_probs_on_input",
    "attn_logit_softcapping", "final_logit_softcapping", "softmax_type", "no_rope_freq",
    "rotary_seq_len_interpolation_factor", "apply_residual_connection_post_layernorm",
    "openai_gelu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "kv_source_layers", "no_rope_latent_keys", "rotary_exponents", "scalable_softmax",
    "latent_norm_epsilon", "rope_interleave", "experimental_attention_variant",
    "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_allow_neg_eigval", "linear_norm_epsilon",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_full_rank_gates", "linear_decay_bound",
    "hybrid_layer_pattern", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
    "mamba_num_heads", "mamba_step_limits", "mamba_gated_norm", "mamba_factors",
    "attention_factors", "mlp_factors",
    "dsa_indexer_head_dim", "dsa_indexer_n_heads", "dsa_indexer_topk",
    "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32", "dsa_indexer_rope_interleaved",
    "dsa_indexer_scoring_relu", "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset",
    "dsa_indexer_block_size", "dsa_indexer_local_blocks",
    "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim", "num_experts",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_latent_size", "moe_router_topk",
    "moe_activation_func_clamp_value",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk",
    "moe_router_enable_expert_bias", "moe_router_dtype", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_branch_norms", "moe_output_norm", "moe_router_scales",
    "moe_average_shared_expert",
    "mrope_section", "mrope_interleaved",
    "vision_model_type", "vision_num_layers", "vision_hidden_size", "vision_num_attention_heads",
    "vision_ffn_hidden_size", "num_channels", "patch_dim", "temporal_patch_size",
    "spatial_merge_size", "vision_window_size", "vision_full_attention_layers",
    "vision_num_position_embeddings", "deepstack_layers", "image_token_id",
    "vision_start_token_id", "vision_end_token_id", "image_min_pixels", "image_max_pixels",
    "image_mean", "image_std",
    "use_mup", "mup_base_hidden_size", "mup_width_mult", "mup_base_head_dim",
    "mup_attn_scale_power", "mup_embedding_mult", "mup_output_mult",
)  # fmt: skip
"""Settings that `--use-checkpoint-args` reads: the model, but not the layout or the schedule."""

TOKENIZER_FILES = {"tokenizer_model", "vocab_file", "merge_file"}


def stored_args(
    directory: str | None, ckpt_step: int | None = None, *, save: str | None = None
) -> Namespace | None:
    """Return the settings in the newest readable checkpoint of a directory.

    See `select_checkpoints` for the arguments.
    """
    if directory is None:
        return None
    for found in select_checkpoints(storage_path(directory), ckpt_step, save=save).candidates:
        try:
            state = open_any(found.path, peers=SingleProcess()).common_state()
        except CheckpointError:
            continue
        args = state.get("args")
        if isinstance(args, Namespace):
            return args
    return None


def with_checkpoint_shape(config: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """Return the settings with the checkpoint's model, if --use-checkpoint-args is set.

    Args:
        given: fields that the user set; they stay unchanged. If they include a field of the
            tokenizer, all fields of the tokenizer stay unchanged.
    """
    if not config.checkpoint.use_checkpoint_args:
        return config
    saved = config.checkpoint
    stored = stored_args(saved.load, saved.ckpt_step, save=saved.save)
    if stored is None:
        return config
    # Padding depends on the layout and is derived again.
    left_out = {"padded_vocab_size", *given}
    if not saved.use_tokenizer_model_from_checkpoint_args:
        # Opening files that an untrusted checkpoint names needs the user's consent.
        left_out |= TOKENIZER_FILES
    if "hybrid_layer_pattern" in given:  # it determines these
        left_out |= {"num_layers", "moe_layer_freq"}
    if "tokenizer_type" in given or TOKENIZER_FILES & set(given):
        left_out |= {"tokenizer_type", "vocab_size", *TOKENIZER_FILES}
        left_out.add("tokenizer_hf_no_include_special_tokens")
    names = [n for n in MODEL_SHAPE_ARGS if n in all_flags() and n not in left_out]
    taken = {name: getattr(stored, name) for name in names if hasattr(stored, name)}
    classes = getattr(stored, "unpadded_vocab_size", None)
    if isinstance(classes, int) and "vocab_size" not in given:
        taken["vocab_size"] = classes
    return RunConfig.from_values({**config.flat(), **taken})
