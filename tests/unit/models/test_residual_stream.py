"""Where the residual stream is taken and in which precision it is kept, in every kind of model."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import BF16_WHOLE_MODEL, EXACT, assert_close

GATED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_grouped_gemm": True}
KINDS = {
    "gpt2": {"hidden_dropout": 0.1},
    "llama": GATED,
    "sandwich": GATED | {"sandwich_norm": True},
    "parallel": {"use_parallel_residual": True},
    "experts": GATED | EXPERTS | {"moe_shared_expert_intermediate_size": 16},
    "later tokens": GATED | EXPERTS | {"mtp_num_layers": 2, "moe_layer_freq": [0, 1]},
    "latent": GATED
    | {
        "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "qk_layernorm": True,
    },
}  # fmt: skip


def build(kind, dtype=torch.float32, **fields):
    """Return a model of two layers; the same weights for every dtype, up to rounding."""
    rng_state().set_seed(11)
    is_half = dtype != torch.float32
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, params_dtype=dtype,
        bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, init_method_std=0.1,
        unpadded_vocab_size=50,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": 48}
        | KINDS[kind] | fields,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, False)
    model = GPTModel(
        config, spec, vocab_size=64, max_sequence_length=8,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False),
        position_embedding_type="learned_absolute" if kind == "gpt2" else "rope",
        share_embeddings_and_output_weights=kind == "gpt2",
        pg_collection=ProcessGroupCollection.single(),
    )  # fmt: skip
    return Float16Module(config, model) if is_half else model


def step(model):
    """Return the loss of every token and all gradients."""
    ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))
    rng_state().begin_step(0, micro_batch_size=2, dp_rank=0, dp_size=1)
    loss = model(ids[:, :-1], None, None, labels=ids[:, 1:])
    loss.mean().backward()
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **{n: g for n, g in found.items() if g is not None}}


COMBINATIONS = [
    (kind, in_fp32, post_norm)
    for kind, in_fp32, post_norm in product(KINDS, [False, True], [False, True])
    if not (kind == "parallel" and post_norm)
]


@pytest.mark.parametrize(("kind", "in_fp32", "post_norm"), COMBINATIONS)
def test_half_precision_computes_the_fp32_model(kind, in_fp32, post_norm):
    fields = {
        "fp32_residual_connection": in_fp32,
        "apply_residual_connection_post_layernorm": post_norm,
    }
    whole = step(build(kind, **fields))
    brain = step(build(kind, torch.bfloat16, **fields))
    assert_close(brain["loss"], whole["loss"], BF16_WHOLE_MODEL, "loss")
    half = step(build(kind, torch.float16, **fields))
    assert half.keys() == brain.keys() == whole.keys()
    # bf16 may send a token near the border between two experts to the other one.
    for name, value in whole.items():
        assert_close(half[name], value, BF16_WHOLE_MODEL, name)


@pytest.mark.parametrize(("kind", "in_fp32", "post_norm"), COMBINATIONS)
def test_recomputing_norms_changes_no_bit(kind, in_fp32, post_norm):
    fields = {
        "fp32_residual_connection": in_fp32,
        "apply_residual_connection_post_layernorm": post_norm,
        "recompute_granularity": "selective",
    }
    for dtype, others in ((torch.float32, []), (torch.bfloat16, ["core_attn", "mlp", "moe"])):
        expected = step(build(kind, dtype, **fields, recompute_modules=others))
        found = step(build(kind, dtype, **fields, recompute_modules=["layernorm", *others]))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value, EXACT, f"{name} in {dtype}")


@pytest.mark.parametrize("post_norm", [False, True])
def test_an_fp32_stream_adds_without_rounding(post_norm):
    fields = {"apply_residual_connection_post_layernorm": post_norm}
    model = build("llama", torch.bfloat16, fp32_residual_connection=True, **fields).module
    layer = model.decoder.layers[1]
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(4))
    angles = model.rotary_pos_emb(8)

    def compute(norm, branch, x):
        normed = norm(x)
        out, _ = branch(normed.bfloat16())
        return (normed if post_norm else x) + out

    attention = lambda normed: layer.self_attention(normed, None, rotary_pos_emb=angles)  # noqa: E731
    expected = compute(layer.input_layernorm, attention, x)
    expected = compute(layer.pre_mlp_layernorm, layer.mlp, expected)
    found, _ = layer(x, rotary_pos_emb=angles)
    assert found.dtype == torch.float32
    assert_close(found, expected, EXACT, "residual stream")


def test_stages_hand_on_an_fp32_stream_as_fp32():
    fields = {"params_dtype": torch.bfloat16, "bf16": True, "num_layers": 2, "hidden_size": 32}
    config = TransformerConfig(**fields, num_attention_heads=4, fp32_residual_connection=True)
    assert config.pipeline_dtype == torch.float32
