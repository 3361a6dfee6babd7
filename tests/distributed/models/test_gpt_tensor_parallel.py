"""A GPT split over tensor-parallel ranks gives the loss and gradients of the whole model."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.param_meta import get_param_meta, unshard
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

VOCAB, LENGTH = 45, 16

FAMILIES = {
    "gpt2": {},
    "llama": {
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
        "add_bias_linear": False, "num_query_groups": 2,
    },
    "qwen": {
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
        "add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True,
        "num_query_groups": 2,
    },
    "gated heads": {
        "normalization": "RMSNorm", "add_qkv_bias": True, "num_query_groups": 2,
        "attention_output_gate": True,
    },
    "a gate for each head": {
        "normalization": "RMSNorm", "num_query_groups": 2, "attention_output_gate": True,
        "attention_gate_by_head": True, "attention_gate_activation": "softplus",
        "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
        "activation_func_clamp_value": 0.01, "activation_func_clamp_after": True,
    },
    "gated delta net": {
        "normalization": "RMSNorm", "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    },
    "kimi delta attention": {
        "normalization": "RMSNorm", "hybrid_layer_pattern": "K-", "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    },
    "mamba": {
        "normalization": "RMSNorm", "hybrid_layer_pattern": "M-", "mamba_num_groups": 4,
        "mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_state_dim": 5,
    },
    "attention and mamba": {
        "normalization": "RMSNorm", "experimental_attention_variant": "attention_and_mamba2",
        "mamba_num_groups": 4, "mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_state_dim": 5,
        "attention_factors": [1.2, 0.8, 0.7], "mamba_factors": [1.0, 1.1, 0.8, 1.2, 0.7, 1.3, 0.6],
    },
    "sparse attention": {
        "normalization": "RMSNorm", "multi_latent_attention": True, "rope_type": "rope",
        "qk_layernorm": True, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "add_bias_linear": False,
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 6,
        "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 5, "dsa_indexer_loss_coeff": 2.0,
    },
    "compressed attention": {
        "normalization": "RMSNorm", "multi_latent_attention": True, "qk_layernorm": True,
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4,
        "v_head_dim": 10, "add_bias_linear": False, "window_size": (4, 0),
        "experimental_attention_variant": "dsv4_hybrid", "csa_compress_ratios": [4, 3],
        "o_groups": 4, "o_lora_rank": 6, "softmax_type": "learnable", "dsa_indexer_n_heads": 6,
        "dsa_indexer_head_dim": 8, "dsa_indexer_topk": 2, "dsa_indexer_loss_coeff": 2.0,
    },
    "hyper-connections": {
        "normalization": "RMSNorm", "enable_mhc_connections": True, "mhc_num_residual_streams": 3,
        "mhc_init_gating_factor": 1.0, "mhc_learned_contraction": True,
    },
    "alternating updates": {
        "normalization": "RMSNorm", "altup_num_inputs": 3, "altup_active_idx": 1,
        "altup_coef_clip": 0.1, "laurel_rank": 4, "activation_sparsity": 0.5,
    },
    # RMSNorm, because the gradient of a key norm's bias says nothing about the layout: softmax
    # hardly sees a constant added to all keys, so that gradient is a sum whose terms cancel (here
    # their absolute values add up to 84 times the sum), dominated by rounding in any layout.
    "one key head": {"num_query_groups": 1, "qk_layernorm": True, "normalization": "RMSNorm"},
}  # fmt: skip


def gradients_of_a_step(groups, family, tied, options):
    """Return the loss [b, s] and the whole model's gradients by name."""
    tp = groups.tp.size()
    rng_state().set_seed(17)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24,
        init_method_std=0.2, unpadded_vocab_size=VOCAB, tensor_model_parallel_size=tp,
        **{"hidden_dropout": 0.1, "attention_dropout": 0.1, **FAMILIES[family], **options},
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=0),
        vocab_size=-(-VOCAB // (4 * tp)) * 4 * tp,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute" if family == "gpt2" else "rope",
        pg_collection=groups,
    )
    text = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    rng_state().begin_step(24, micro_batch_size=2, dp_rank=0, dp_size=1)
    loss = model(text[:, :-1], None, None, labels=text[:, 1:])
    loss.sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        meta, grad = get_param_meta(parameter), parameter.grad
        if tp > 1 and "tp" in meta.partial_grad_axes:
            dist.all_reduce(grad, group=groups.tp)
        if tp > 1:
            shards = [torch.empty_like(grad) for _ in range(tp)]
            dist.all_gather(shards, grad.contiguous(), group=groups.tp)
            if meta.split_dim is None:
                for shard in shards:
                    assert torch.equal(shard, grad), f"ranks differ in the gradient of {name}"
            grad = unshard(shards, meta)
        is_vocabulary = "word_embeddings" in name or "output_layer" in name
        gradients[name] = grad[:VOCAB] if is_vocabulary else grad
    return loss.detach(), gradients


CASES = [
    ("gpt2", True, 2, {}),
    ("gpt2", False, 2, {"sequence_parallel": True}),
    ("llama", False, 2, {}),
    ("sparse attention", False, 2, {"dsa_indexer_use_sparse_loss": True}),
    ("sparse attention", True, 4, {
        "sequence_parallel": True, "recompute_granularity": "selective",
    }),
    ("compressed attention", False, 2, {"sequence_parallel": True}),
    ("compressed attention", True, 4, {"recompute_granularity": "selective"}),
    ("hyper-connections", False, 2, {"mhc_sinkhorn_iterations": 0}),
    ("alternating updates", False, 2, {"gated_linear_unit": True}),
    ("alternating updates", True, 4, {
        "sequence_parallel": True, "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm", "mlp"],
    }),
    ("hyper-connections", True, 4, {
        "sequence_parallel": True, "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm"],
    }),
    ("sparse attention", False, 2, {
        "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1, "sequence_parallel": True,
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    }),
    ("mamba", True, 4, {"sequence_parallel": True}),
    ("kimi delta attention", False, 4, {
        "sequence_parallel": True, "recompute_granularity": "selective",
    }),
    ("llama", True, 4, {"sequence_parallel": True}),
    ("qwen", False, 2, {"sequence_parallel": True}),
    ("qwen", True, 4, {}),
    ("one key head", True, 2, {"sequence_parallel": True}),
    ("gated heads", False, 2, {"recompute_granularity": "selective"}),
    ("gated heads", True, 4, {"sequence_parallel": True}),
    ("gated delta net", False, 4, {
        "sequence_parallel": True, "recompute_granularity": "selective",
    }),
    ("llama", True, 2, {"sequence_parallel": True, "cross_entropy_loss_fusion": True}),
    ("llama", False, 4, {
        "sequence_parallel": True, "recompute_granularity": "full", "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }),
    ("gpt2", False, 2, {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "layernorm"], "sequence_parallel": True,
    }),
]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "tied", "tp", "options"), CASES)
def test_loss_and_every_gradient_equal_the_serial_models_with_dropout(family, tied, tp, options):
    serial_options = {k: v for k, v in options.items() if k != "sequence_parallel"}
    serial = gradients_of_a_step(ProcessGroupCollection.single(), family, tied, serial_options)
    expected_loss, expected = serial
    results = run_distributed(gradients_of_a_step, tp, family, tied, options, tp=tp)
    for rank, (loss, gradients) in enumerate(results):
        assert torch.equal(loss, results[0][0]), f"rank {rank} has another loss"
        assert_close(loss, expected_loss, FP32_REORDERED_SUM, "loss")
        assert gradients.keys() == expected.keys()
        for name, grad in gradients.items():
            assert_close(grad, expected[name], FP32_REORDERED_SUM, f"gradient of {name}")
