"""Small models of Transformers with every special feature on, and ours built from them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.core.dist_checkpointing.loader import load_state
from megatron.core.dist_checkpointing.validation import parse_strict_handling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.core.transport.object_collectives import SingleProcess
from megatron.hugging_face import open_model
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from tests.unit.hugging_face.step_text import Step3p5ForCausalLM

VOCAB, LENGTH = 97, 24
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
_NEOX = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 64, "layer_norm_eps": 1e-6,
}  # fmt: skip
_OF_HEADS = {
    **_SIZES, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
}  # fmt: skip
_LATENT = {
    **_OF_HEADS, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
_GLM = {
    **_SIZES, "head_dim": 16, "pad_token_id": None, "eos_token_id": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_BESIDE_SHARED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}  # fmt: skip

_GEMMA4 = {
    **_SIZES, "rms_norm_eps": 1e-1, "head_dim": 16, "global_head_dim": 32, "sliding_window": 7,
    "pad_token_id": None,
}  # fmt: skip
_COUNTED = {
    "num_experts": 8, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
}  # fmt: skip
# Heads are normed after the recurrence: where their output is nearly zero, a small epsilon would
# make rounding errors large, here and there.
_QWEN3_5 = {
    **_SIZES, "rms_norm_eps": 1e-1, "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}  # fmt: skip

_GEMMA3N = {
    **_SIZES, "pad_token_id": None, "head_dim": 32, "sliding_window": 7, "rms_norm_eps": 1e-1,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB - 30, "laurel_rank": 8,
    "altup_num_inputs": 3, "altup_active_idx": 1, "final_logit_softcapping": 3.0,
    "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.0, 0.7, 0.5],
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_GRANITE = {
    **_SIZES, "pad_token_id": None, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
    "residual_multiplier": 0.7, "logits_scaling": 2.0,
}  # fmt: skip
_GRANITE_4 = {
    **_GRANITE, "rms_norm_eps": 1e-2, "shared_intermediate_size": 48, "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 4, "mamba_d_state": 12,
}  # fmt: skip

_FALCON_H1 = {
    **_SIZES, "rms_norm_eps": 1e-2, "pad_token_id": None, "head_dim": 16, "mamba_d_ssm": 96,
    "mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_state": 12,
}  # fmt: skip
_HEADS_BY_LAYER = {
    **_SIZES, "head_dim": 16, "moe_intermediate_size": 32, "num_experts_per_tok": 3,
    "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip

_LFM2 = {
    **{n: v for n, v in _SIZES.items() if n != "rms_norm_eps"},
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "pad_token_id": None,
    "norm_eps": 1e-2,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 1e-6},
    ),
    "gpt2, untied, another width": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
         "n_inner": 96, "tie_word_embeddings": False, "activation_function": "gelu",
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("LlamaConfig", {**_SIZES, "rope_theta": 5000.0}),
    "llama 3.1, tied": (
        "LlamaConfig",
        {**_SIZES, "max_position_embeddings": 32768, "tie_word_embeddings": True,
         "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama, interpolated": (
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral, sliding window": ("MistralConfig", {**_SIZES, "sliding_window": 7, "head_dim": 32}),
    "qwen2, tied": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 32}),
    "phi3, partly rotated": (
        "Phi3Config",
        {**_SIZES, "sliding_window": 9, "partial_rotary_factor": 0.5, "pad_token_id": None,
         "bos_token_id": 1, "eos_token_id": 2, "original_max_position_embeddings": 64},
    ),
    "phi4 mini, long": (
        "Phi3Config",
        {**_SIZES, "tie_word_embeddings": True, "pad_token_id": None, "bos_token_id": 1,
         "eos_token_id": 2, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4,
                             "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                             "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]}},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {**_NEOX, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0,
                                      "partial_rotary_factor": 0.25}},
    ),
    "gpt_neox, one after the other, tied": (
        "GPTNeoXConfig",
        {**_NEOX, "use_parallel_residual": False, "tie_word_embeddings": True,
         "hidden_act": "gelu_fast"},
    ),
    "gemma2": (
        "Gemma2Config",
        {**_SIZES, "pad_token_id": None, "head_dim": 32, "query_pre_attn_scalar": 24,
         "sliding_window": 7,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SIZES, "pad_token_id": None, "head_dim": 32, "query_pre_attn_scalar": 24,
         "sliding_window": 7,
         "final_logit_softcapping": 3.0,
         "layer_types": ["sliding_attention", "full_attention", "full_attention",
                         "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {**_GEMMA3N, "intermediate_size": [96, 96, 64, 96],
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
    ),
    "gemma3n, shared keys": (
        "Gemma3nTextConfig",
        {**_GEMMA3N, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "altup_active_idx": 0,
         "vocab_size_per_layer_input": VOCAB, "altup_num_inputs": 4,
         "activation_sparsity_pattern": [0.8] * 2 + [0.0] * 3,
         "layer_types": ["full_attention", "sliding_attention", "full_attention",
                         "sliding_attention", "full_attention"]},
    ),
    "gemma4, keys as values": (
        "Gemma4TextConfig",
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma4, shared keys, vectors by layer": (
        "Gemma4TextConfig",
        {**_GEMMA4, "num_hidden_layers": 5, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True,
         "layer_types": ["full_attention", "sliding_attention", "full_attention",
                         "sliding_attention", "full_attention"]},
    ),
    "gemma4, experts beside the MLP": (
        "Gemma4TextConfig",
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
         "moe_intermediate_size": 48,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mixtral": (
        "MixtralConfig",
        {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "qwen3 with experts": (
        "Qwen3MoeConfig",
        {**_SIZES, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen3 with experts, not normed": (
        "Qwen3MoeConfig",
        {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": False},
    ),
    "qwen2, stretched": (
        "Qwen2Config",
        {**_SIZES, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 16}},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**_SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
         "sliding_window": 7, "swiglu_limit": 0.5, "rope_parameters": {
             "rope_type": "yarn", "factor": 4.0, "rope_theta": 150000.0, "truncate": False,
             "beta_fast": 4.0, "original_max_position_embeddings": 16}},
    ),
    "deepseek v2": (
        "DeepseekV2Config",
        {**_LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3,
         "num_experts_per_tok": 4, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
         "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "deepseek v2 lite, tied": (
        "DeepseekV2Config",
        {**_LATENT, "topk_method": "greedy", "q_lora_rank": None, "num_experts_per_tok": 3,
         "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
    "deepseek v3": (
        "DeepseekV3Config",
        {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "rope_parameters": _YARN},
    ),
    "deepseek v3.2": (
        "DeepseekV32Config",
        {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "rope_parameters": _YARN,
         # So many heads that no key has a score of zero, of which any may be chosen there.
         "index_n_heads": 16, "index_head_dim": 12, "index_topk": 6, "pad_token_id": None},
    ),
    "glm with chosen keys": (
        "GlmMoeDsaConfig",
        {**_LATENT, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
         "n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
         "index_n_heads": 16, "index_head_dim": 12, "index_topk": 6, "pad_token_id": None,
         # Layers 1 and 3 choose keys, which layers 2 and 4 share.
         "indexer_types": ["full", "shared"] * 2},
    ),
    "hy_v4": (
        "HYV4Config",
        {**_LATENT, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "routed_scaling_factor": 2.5, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
         "index_n_heads": 16, "index_head_dim": 12, "index_topk": 6, "pad_token_id": None,
         "indexer_types": ["full", "shared"] * 2, "swiglu_limit": 0.1, "hc_mult": 3,
         "hc_magnitude": 1.5, "hc_eps": 1e-3},
    ),
    "deepseek v4": (
        "DeepseekV4Config",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "moe_intermediate_size": 32,
         "head_dim": 16, "partial_rotary_factor": 0.25, "q_lora_rank": 24, "n_routed_experts": 8,
         "num_experts_per_tok": 3, "sliding_window": 5, "o_groups": 4, "o_lora_rank": 8,
         "index_n_heads": 16, "index_head_dim": 12, "index_topk": 2, "pad_token_id": None,
         "hc_mult": 3, "hc_eps": 1e-3, "swiglu_limit": 0.1,
         "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 2, "layer_types": [
             "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
             "compressed_sparse_attention"],
         "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
         "rope_parameters": {n: v for n, v in _YARN.items() if not n.startswith("mscale")}},
    ),
    "glm4 lite": (
        "Glm4MoeLiteConfig",
        {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "routed_scaling_factor": 1.8, "rope_parameters": _YARN,
         "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "axk1": (
        "AXK1Config",
        {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1,
         "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": _YARN,
         "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "youtu": ("YoutuConfig", {**_OF_HEADS, "tie_word_embeddings": True, "rope_interleave": False,
                              "bos_token_id": 1, "eos_token_id": 2}),
    "kimi_linear": (
        "KimiLinearConfig",
        # As of qwen3_next, an epsilon that heads with nearly no output stand.
        {**_LATENT, "rms_norm_eps": 1e-1, "q_lora_rank": None, "n_routed_experts": None,
         "num_local_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
         "n_shared_experts": 1, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
         "linear_head_dim": 16, "linear_num_heads": 4, "layer_types": [
             "linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "ling 3": (
        "BailingHybridConfig",
        {**_OF_HEADS, "rms_norm_eps": 1e-1, "q_lora_rank": None, "num_local_experts": 8,
         "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
         "n_shared_experts": 1, "pad_token_id": None, "eos_token_id": 2, "head_dim": 12,
         "first_k_dense_replace": 1, "layer_group_size": 3},
    ),
    "ling 3, unbounded": (
        "BailingHybridConfig",
        {**_OF_HEADS, "rms_norm_eps": 1e-1, "q_lora_rank": None, "num_local_experts": 8,
         "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
         "n_shared_experts": 1, "pad_token_id": None, "eos_token_id": 2, "head_dim": 16,
         "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "kda_safe_gate": False,
         "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "glm5_next": (
        "Glm5NextConfig",
        {"text_config": {
            **{n: v for n, v in _LATENT.items() if n != "qk_rope_head_dim"}, "rms_norm_eps": 1e-1,
            "num_experts_per_tok": 4, "n_shared_experts": 1, "pad_token_id": None,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "layer_types":
                ["linear_attention", "indexed_attention"] * 2,
            # The indexer chooses 2 of 6 pools; up to 3 tokens after them are seen too.
            "index_n_heads": 16, "index_head_dim": 12, "index_topk": 8, "index_kpool": 4,
            "linear_head_dim": 16, "linear_num_heads": 4, "swiglu_limit": 0.1, "hc_mult": 3,
            "hc_eps": 1e-3},
         "vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8,
                           "projection_intermediate_size": 8, "out_hidden_size": 64}},
    ),
    "gemma": ("GemmaConfig", {**_SIZES, "pad_token_id": None, "head_dim": 32}),
    "glm": ("GlmConfig", {**_GLM, "attention_bias": True}),
    "glm4": ("Glm4Config", {**_GLM, "attention_bias": False}),
    "glm4, stretched": (
        "Glm4Config",
        {**_GLM, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 16}},
    ),
    "glm4 with experts": (
        "Glm4MoeConfig",
        {**_GLM, **_BESIDE_SHARED, "attention_bias": True, "use_qk_norm": True},
    ),
    "dots1": (
        "Dots1Config",
        {**_SIZES, **_BESIDE_SHARED, "norm_topk_prob": True, "sliding_window": 7,
         "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "solar_open": (
        "SolarOpenConfig",
        {**_SIZES, **_BESIDE_SHARED, "first_k_dense_replace": 0, "head_dim": 32,
         "attention_bias": True},
    ),
    "flint": (
        "FlintConfig",
        {**_SIZES, "head_dim": 32, "moe_intermediate_size": 32, "num_experts": 8,
         "shared_expert_intermediate_size": 48, "num_experts_per_tok": 3, "sliding_window": 7,
         "mlp_only_layers": [0], "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "sarvam with experts": (
        "SarvamMoEConfig",
        {**_SIZES, **_BESIDE_SHARED, "head_dim": 16, "attention_bias": True, "pad_token_id": None},
    ),
    "sarvam with latents": (
        "SarvamMLAConfig",
        {**_LATENT, "q_lora_rank": None, "num_experts_per_tok": 4, "rope_parameters": _YARN},
    ),
    "hy_v3": (
        "HYV3Config",
        {**_SIZES, **_COUNTED, "head_dim": 32, "router_scaling_factor": 2.5,
         "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "exaone4": (
        "Exaone4Config",
        {**_SIZES, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
         "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "exaone4, without windows": (
        "Exaone4Config",
        {**_SIZES, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
         "sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "exaone with experts": (
        "ExaoneMoeConfig",
        {**_SIZES, **_COUNTED, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
         "n_group": 4, "topk_group": 2, "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "seed_oss": (
        "SeedOssConfig",
        {**_SIZES, "head_dim": 32, "attention_dropout": 0.0, "pad_token_id": None},
    ),
    "ernie4_5": ("Ernie4_5Config", {**_SIZES, "head_dim": 32, "pad_token_id": None}),
    "smollm3": (
        "SmolLM3Config",
        {**_SIZES, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": None},
    ),
    "cwm": ("CwmConfig", {**_SIZES, "head_dim": 16, "sliding_window": 7,
                          "rope_parameters": _LLAMA3_ROPE}),
    "ministral": (
        "MinistralConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 7, "rope_parameters": _PLAIN_ROPE,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "internlm3": (
        "InternLM3Config",
        {**_SIZES, "head_dim": 32, "pad_token_id": None, "rope_parameters": {
            "rope_type": "dynamic", "factor": 6.0, "rope_theta": 5000.0}},
    ),
    "iquestcoder": ("IQuestCoderConfig", {**_SIZES, "head_dim": 32}),
    "arcee": ("ArceeConfig", {**_SIZES, "head_dim": 32}),
    "stablelm": (
        "StableLmConfig",
        {**_SIZES, "use_qkv_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "nemotron": (
        "NemotronConfig",
        {**_SIZES, "head_dim": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen2 with experts": (
        "Qwen2MoeConfig",
        {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_QWEN3_5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**_QWEN3_5, "tie_word_embeddings": True}),
    "lara_mini": (
        "LaraMiniConfig",
        {**_QWEN3_5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
         "num_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7,
         "layer_types": ["linear_attention", "sliding_attention", "linear_attention",
                         "full_attention"]},
    ),
    "qwen3_5 with experts": (
        "Qwen3_5MoeTextConfig",
        {**_QWEN3_5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48},
    ),
    "mellum": (
        "MellumConfig",
        {**_SIZES, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "sliding_window": 7,
         "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
         "layer_types": ["full_attention", "sliding_attention"] * 2, "rope_parameters": {
             "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5,
                                "original_max_position_embeddings": 16},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "mamba2": (
        "Mamba2Config",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_heads": 8,
         "head_dim": 16, "n_groups": 4, "state_size": 12, "time_step_limit": (0.01, 0.9)},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"vocab_size": VOCAB, "pad_token_id": None, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "mamba_num_heads": 8, "mamba_head_dim": 12,
         "n_groups": 4, "ssm_state_size": 10, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
         "moe_latent_size": 24, "routed_scaling_factor": 2.5,
         "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
    ),
    "bamba": (
        "BambaConfig",
        {**_SIZES, "rms_norm_eps": 1e-2, "pad_token_id": None, "attn_layer_indices": [2],
         "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 4, "mamba_d_state": 12},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**_FALCON_H1, "key_multiplier": 0.8, "attention_in_multiplier": 1.3,
         "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6,
         "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [0.9, 0.6],
         "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3},
    ),
    "falcon_h1, normed": (
        "FalconH1Config",
        {**_FALCON_H1, "rms_norm_eps": 1e-1, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "time_step_limit": (0.01, 0.9),
         "tie_word_embeddings": True},
    ),
    "granite": (
        "GraniteConfig",
        {**_GRANITE, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 16}},
    ),
    "granite with experts, tied": (
        "GraniteMoeConfig",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "granite with experts and a shared one": (
        "GraniteMoeSharedConfig",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 48},
    ),
    "granite 4": ("GraniteMoeHybridConfig", {**_GRANITE_4, "num_local_experts": 4}),
    "granite 4 without experts": (
        "GraniteMoeHybridConfig",
        {**_GRANITE_4, "num_local_experts": 0, "position_embedding_type": "rope",
         "time_step_limit": (0.01, 0.9)},
    ),
    "granite 4 without mamba": (
        "GraniteMoeHybridConfig",
        {**_GRANITE_4, "num_local_experts": 0, "layer_types": ["full_attention"] * 4,
         "tie_word_embeddings": True},
    ),
    "granite with sinks": (
        "GraniteSWAConfig",
        {**_GRANITE, "sliding_window": 7, "layer_rope_theta": [0, 5e3, 5e3, 1e4],
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention",
                         "full_attention"]},
    ),
    "granite with sinks, stretched": (
        "GraniteSWAConfig",
        {**_GRANITE, "sliding_window": 7, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 16}},
    ),
    "hyperclovax": ("HyperCLOVAXConfig", {**_GRANITE, "head_dim": 32}),
    "hyperclovax, plain": (
        "HyperCLOVAXConfig",
        {**_SIZES, "pad_token_id": None, "use_post_norm": False, "logits_scaling": 0.3},
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
         "n_inner": 96, "layer_norm_epsilon": 1e-6, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**_SIZES, "num_attention_heads": 8, "head_dim": 24, "v_head_dim": 16,
         "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "sliding_window": 7,
         "layer_types": ["full_attention", "sliding_attention"] * 2,
         "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
    ),
    "afmoe": (
        "AfmoeConfig",
        {**_SIZES, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8,
         "num_experts_per_tok": 3, "num_shared_experts": 2, "route_scale": 2.5, "sliding_window": 7,
         "global_attn_every_n_layers": 2, "mup_enabled": True},
    ),
    "laguna": (
        "LagunaConfig",
        {**_HEADS_BY_LAYER, "rms_norm_eps": 1e-2, "num_experts": 8,
         "shared_expert_intermediate_size": 48,
         "num_attention_heads_per_layer": [4, 8, 4, 12], "moe_routed_scaling_factor": 2.5,
         "rope_parameters": {
             "full_attention": {
                 "rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5,
                 "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "laguna, gates of channels": (
        "LagunaConfig",
        {**_HEADS_BY_LAYER, "rms_norm_eps": 1e-2, "num_experts": 8,
         "shared_expert_intermediate_size": 48,
         "gating": "per-element"},
    ),
    "step3p5": (
        "Step3p7TextConfig",
        {**_HEADS_BY_LAYER, "n_routed_experts": 8, "share_expert_dim": 48,
         "num_sliding_attention_heads": 8, "moe_router_scaling_factor": 2.5,
         "query_pre_attn_scalar": 9, "swiglu_limits": [None, 0.0, 0.02, 0.01],
         "swiglu_limits_shared": [0.02, 0.02, None, 0.03], "rope_theta": [5e4, 1e4] * 2,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                          "original_max_position_embeddings": 16}},
    ),
    "llama4": (
        "Llama4TextConfig",
        {**_SIZES, "head_dim": 16, "intermediate_size_mlp": 112, "num_local_experts": 4,
         "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 0],
         "attention_chunk_size": 7, "floor_scale": 4, "attn_scale": 0.3},
    ),
    "apertus": ("ApertusConfig", {**_SIZES, "rope_parameters": _LLAMA3_ROPE}),
    "nanochat": ("NanoChatConfig", {**_SIZES, "pad_token_id": None}),
    "lfm2": (
        "Lfm2Config",
        {**_LFM2, "block_multiple_of": 20, "block_ffn_dim_multiplier": 1.5},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**_LFM2, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "routed_scaling_factor": 1.5, "tie_word_embeddings": False},
    ),
    "starcoder2": ("Starcoder2Config", {**_SIZES, "sliding_window": 7}),
    "olmo2": ("Olmo2Config", {**_SIZES, "pad_token_id": None, "rope_parameters": _PLAIN_ROPE}),
    "olmo3, stretched": (
        "Olmo3Config",
        {**_SIZES, "pad_token_id": None, "sliding_window": 7, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                               "original_max_position_embeddings": 16,
                               "attention_factor": 1.1386294361119891},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {**_SIZES, "rms_norm_eps": 1e-1, "pad_token_id": None, "rope_parameters":
            {"rope_type": "default", "rope_theta": None},
         "layer_types": ["linear_attention", "linear_attention", "full_attention",
                         "linear_attention"],
         # Transformers splits the convolution of queries, keys and values into equal parts.
         "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 20,
         "linear_value_head_dim": 10},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {**_SIZES, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                             "partial_rotary_factor": 0.5}},
    ),
    "minimax_m3": (
        "MiniMaxM3VLConfig",
        {"text_config": {
            **_SIZES, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3,
         "dense_intermediate_size": 112, "shared_intermediate_size": 48, "swiglu_limit": 0.1,
         "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
         "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
         "index_n_heads": 2, "index_head_dim": 20, "index_block_size": 4, "index_topk_blocks": 3,
         "index_local_blocks": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                      "partial_rotary_factor": 0.5}},
         "projector_hidden_size": 8, "vision_config": {
             "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 1, "patch_size": 2, "image_size": 4}},
    ),
    "ernie4_5 with experts": (
        "Ernie4_5_MoeConfig",
        {**_SIZES, "pad_token_id": None, "moe_num_experts": 8, "moe_k": 3,
         "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_layer_interval": 2,
         "moe_layer_start_index": 1},
    ),
    "cohere": ("CohereConfig", {**{n: v for n, v in _SIZES.items() if n != "rms_norm_eps"},
                                "pad_token_id": None, "logit_scale": 0.25,
                                "tie_word_embeddings": False}),
    "cohere2": ("Cohere2Config", {**{n: v for n, v in _SIZES.items() if n != "rms_norm_eps"},
                                  "pad_token_id": None, "logit_scale": 0.25, "sliding_window": 7}),
    "cohere2 with experts": (
        "Cohere2MoeConfig",
        {**{n: v for n, v in _SIZES.items() if n != "rms_norm_eps"}, "pad_token_id": None,
         "bos_token_id": 1, "eos_token_id": 2, "logit_scale": 0.25, "sliding_window": 7,
         "head_dim": 16, "num_experts": 8,
         "num_experts_per_tok": 3, "num_shared_experts": 2, "first_k_dense_replace": 1,
         "sliding_window_pattern": 2, "prefix_dense_intermediate_size": 112},
    ),
    "cohere2 with experts, sigmoid": (
        "Cohere2MoeConfig",
        {**_SIZES, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "logit_scale": 0.25,
         "sliding_window": 7, "head_dim": 16,
         "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1,
         "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid",
         "prefix_dense_sliding_window_pattern": 3, "tie_word_embeddings": False,
         "mlp_layer_types": ["sparse", "dense", "dense", "sparse"]},
    ),
    "ministral3": (
        "Ministral3Config",
        {**_SIZES, "head_dim": 32, "pad_token_id": None, "rope_parameters":
            {**_YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4}},
    ),
    "mistral4": (
        "Mistral4Config",
        {**_LATENT, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "routed_scaling_factor": 1.5, "pad_token_id": None, "rope_parameters":
            {**_YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4}},
    ),
    "mistral_large4": (
        "MistralLarge4Config",
        {"text_config": {
            **{n: v for n, v in _LATENT.items() if n != "q_lora_rank"}, "rms_norm_eps": 1e-4,
            "num_experts_per_tok": 3, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
            "num_hidden_layers": 6, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 6,
            "indexer_types": ["full", "shared", "shared"] * 2, "no_rope_layers": [1, 0] * 3,
            "kv_source_layers": [0, 1, 0, 3, 4, 3], "final_logit_softcapping": 4.0,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                "original_max_position_embeddings": 16, "beta_fast": 4.0,
                                "attention_factor": 1.0}},
         "vision_config": {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8,
                           "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 14,
                           "image_size": 28}},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {**_SIZES, "head_dim": 32, "pad_token_id": None, "rope_parameters": {
            "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {**_SIZES, "rms_norm_eps": 1e-3, "head_dim": 32, "pad_token_id": None,
         "num_experts": 8, "moe_topk": 3,
         "rope_parameters": _PLAIN_ROPE},
    ),
}  # fmt: skip
"""Name -> config class of Transformers and its arguments."""


def their_class(config: Any) -> Any:
    """Return Transformers' class of the causal model of a config; not every class has a name in
    its table of automatic classes."""
    known = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in known and hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    name = type(config).__name__.replace("Config", "ForCausalLM")
    if config.model_type == "step3p5":
        return Step3p5ForCausalLM
    return known[type(config)] if type(config) in known else getattr(transformers, name)


def their_model(case: str) -> Any:
    """Build a model of Transformers with random weights, norms and biases included."""
    kind, fields = CASES[case]
    config = getattr(transformers, kind)(**fields)
    torch.manual_seed(3)
    model = their_class(config)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # A channel of a convolution has four taps, not the width of the model.
                parameter.normal_(0, 0.5 if "conv1d" in name or "conv.conv" in name else 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if kind.startswith(("Gemma3n", "Gemma4")) and name.endswith("q_norm.weight"):
                # Scores have no factor 1 / sqrt(d): the published weights of this norm contain it.
                parameter.mul_(len(parameter) ** -0.5)
            if name.endswith("rotary_emb.alpha"):
                parameter.mul_(3.0).requires_grad_(False)  # training does not change it here
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.1)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            if name.endswith("tid2eid"):  # different experts for each token
                buffer.copy_(torch.rand(len(buffer), 8).topk(buffer.shape[1]).indices)
    return model.eval()


def saved(case: str, directory: Path) -> Any:
    """Build such a model, save it in `directory`, and return it."""
    model = their_model(case)
    model.save_pretrained(directory)
    return model


def flags_for(directory: Path) -> list[str]:
    """Return the command line that starts from a model, with a dropout of 0."""
    return [
        "--load-hf", str(directory), "--seq-length", str(LENGTH), "--micro-batch-size", "1",
        "--hidden-dropout", "0", "--attention-dropout", "0", "--transformer-impl", "local",
        "--train-iters", "1", "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer",
    ]  # fmt: skip


def our_model(
    directory: Path, groups: ProcessGroupCollection | None = None, *words: str
) -> tuple[GPTModel, dict[str, Any]]:
    """Build this rank's part of the model that the settings of a directory describe, and load it.

    Args:
        groups: of this rank; None is one process.
        words: further flags, of the layout for example.
    """
    groups = groups or ProcessGroupCollection.single()
    stage, num_stages = groups.pp.rank(), groups.pp.size()
    tp = groups.tp.size()
    config = parse_command_line([*flags_for(directory), *words]).config
    run = resolve(config, world_size=tp * num_stages * groups.dp_cp.size())
    run = run.overlaid({"unpadded_vocab_size": run.tokenizer.vocab_size})
    transformer = run.transformer_config
    model = GPTModel(
        transformer,
        get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, pp_rank=stage),
        vocab_size=-(-run.tokenizer.vocab_size // (128 * tp)) * 128 * tp,
        max_sequence_length=run.model.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == num_stages - 1,
        share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
        position_embedding_type=run.model.position_embedding_type,
        rotary_base=run.latent_attention.rotary_base,
        rotary_percent=run.model.rotary_percent,
        seq_len_interpolation_factor=run.model.rotary_seq_len_interpolation_factor,
        rope_scaling=run.model.use_rope_scaling,
        rope_scaling_factor=run.model.rope_scaling_factor,
        pg_collection=groups,
    )
    load_state(
        sharded_state_dict_of(model, pg_collection=groups),
        open_model(directory),
        peers=SingleProcess(),
        strict=parse_strict_handling("raise_unexpected"),
    )
    return model, {**run.values}
