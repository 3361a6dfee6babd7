"""What a layer is made of: combinations that cannot be are refused, all in one message."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig

SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}

LINEAR = {
    "experimental_attention_variant": "gdn", "linear_num_key_heads": 4, "linear_num_value_heads": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attn_logit_softcapping": 0.0}, "--attn-logit-softcapping"),
        ({"final_logit_softcapping": -1.0}, "--final-logit-softcapping"),
        ({"embedding_multiplier": float("inf")}, "--embedding-multiplier"),
        ({"residual_multiplier": 0.0}, "--residual-multiplier"),
        ({"logits_scaling": -8.0}, "--logits-scaling"),
        ({"window_attn_skip_freq": 0}, "--window-attn-skip-freq"),
        ({"window_attn_skip_freq": [1, 0]}, "2 layers for a model of 4"),
        ({"window_attn_skip_freq": [1, 0, 2, 0]}, "one 0 or 1 per layer"),
        ({"use_parallel_residual": True, "apply_residual_connection_post_layernorm": True},
         "--use-parallel-residual"),
        ({"reordered_norm": True, "sandwich_norm": True}, "drop one of them"),
        ({"qk_layernorm": True, "qk_layernorm_across_heads": True}, "use --normalization RMSNorm"),
        ({"reordered_norm": True, "multi_latent_attention": True}, "--multi-latent-attention"),
        ({"rotary_amplitude": 0.0}, "--rotary-amplitude"),
        ({"final_logit_softcapping": 30.0, "cross_entropy_loss_fusion": True},
         "drop --cross-entropy-loss-fusion"),
        ({"rotary_base_local": 1e4, "mtp_num_layers": 1}, "--rotary-base-local"),
        ({"qk_l2_norm": True, "qk_layernorm": True}, "drop --qk-l2-norm"),
        ({"v_channels": 4, "attention_output_gate": True}, "drop --v-channels"),
        ({"v_channels": 4, "multi_latent_attention": True}, "drop --v-channels"),
        ({"attention_value_scale": 0.5, "multi_latent_attention": True},
         "drop --attention-value-scale"),
        ({"attention_k_eq_v": True, "v_channels": 4}, "drop --v-channels"),
        ({"num_kv_shared_layers": 2, "mtp_num_layers": 1}, "drop --mtp-num-layers"),
        ({"num_kv_shared_layers": 2, "pipeline_model_parallel_size": 2,
          "pipeline_dtype": torch.float32}, "drop --pipeline-model-parallel-size"),
        ({"per_layer_embed_dim": 8, "recompute_granularity": "full", "recompute_num_layers": 1,
          "recompute_method": "uniform"}, "drop --recompute-granularity"),
        ({"num_kv_shared_layers": 4}, "layer 1 has the window None"),
        ({"num_kv_shared_layers": 2, "window_size": (3, 0), "window_attn_skip_freq": [1, 1, 1, 0]},
         "share fewer layers"),
        ({"attention_chunk_size": 0}, "--attention-chunk-size"),
        ({**LINEAR, "linear_attention_freq": [1, 0, 1]}, "--linear-attention-freq"),
        ({**LINEAR, "linear_key_head_dim": 0}, "--linear-key-head-dim"),
        ({**LINEAR, "linear_num_key_heads": 3}, "use --linear-num-key-heads 2"),
        ({**LINEAR, "tensor_model_parallel_size": 4, "linear_num_key_heads": 2},
         "use --tensor-model-parallel-size 2"),
        ({"experimental_attention_variant": "gdn2"}, "use gated_delta_net"),
        ({"experimental_attention_variant": "attention_and_mamba2", "multi_latent_attention": True},
         "drop --multi-latent-attention"),
        ({**LINEAR, "mamba_factors": [1.0] * 5}, "give 7 numbers"),
        ({"mlp_factors": [1.0, 2.0]}, "use --swiglu"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        TransformerConfig(**SIZES, **fields)


def test_a_width_of_heads_that_is_given_may_be_the_one_that_is_no_whole_part_of_the_model():
    sizes = SIZES | {"hidden_size": 34}
    assert TransformerConfig(**sizes, kv_channels=8).kv_channels == 34 // 4 == 8
    with pytest.raises(ConfigError, match="without --kv-channels"):
        TransformerConfig(**sizes)
    with pytest.raises(ConfigError, match="leave --kv-channels out"):
        TransformerConfig(**SIZES, kv_channels=0)
    # Heads of multi-latent attention have widths of their own.
    latent = {"multi_latent_attention": True, "qk_head_dim": 8, "v_head_dim": 8}
    TransformerConfig(**sizes, **latent, kv_lora_rank=8, qk_pos_emb_head_dim=4)


@pytest.mark.parametrize(
    ("pattern", "windowed"),
    [
        (None, [True, True, True, True]),
        (1, [False, False, False, False]),
        (2, [True, False, True, False]),
        ([0, 1, 1, 0], [False, True, True, False]),
    ],
)
def test_every_nth_layer_sees_all_keys(pattern, windowed):
    config = TransformerConfig(**SIZES, window_size=(7, 0), window_attn_skip_freq=pattern)
    assert [config.window_of(n + 1) == (7, 0) for n in range(4)] == windowed


@pytest.mark.parametrize(
    ("pattern", "recurrent"),
    [
        (None, [True, True, True, True]),
        (4, [True, True, True, False]),
        ([0, 1, 1, 0], [False, True, True, False]),
    ],
)
def test_every_nth_layer_keeps_attention(pattern, recurrent):
    config = TransformerConfig(**SIZES, **LINEAR, linear_attention_freq=pattern)
    assert [kind.is_recurrent for kind in config.layer_kinds()] == recurrent
    assert config.layer_kind(5).is_recurrent == recurrent[-1]  # of later tokens
