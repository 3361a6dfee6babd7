"""Multi-latent attention and YaRN: the formulas of their papers."""

import math

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.yarn import yarn_attention_factor, yarn_inverse_frequencies
from tests.harness.tolerances import FP32_REORDERED_SUM, FP32_ROUNDED_ONCE, assert_close

HEADS, PLAIN, ROTARY, VALUE, LATENT = 3, 8, 4, 6, 10


def make_attention(q_lora_rank=None, layer=1, **fields):
    config = MLATransformerConfig(
        hidden_size=24, num_attention_heads=HEADS, kv_lora_rank=LATENT,
        q_lora_rank=q_lora_rank, qk_head_dim=PLAIN, qk_pos_emb_head_dim=ROTARY, v_head_dim=VALUE,
        qk_layernorm=True, attention_dropout=0.0, add_bias_linear=False, init_method_std=0.3,
        **{"num_layers": 1, "rope_type": "rope", **fields},
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True)
    config = config.of_layer(layer)
    return build_module(spec.submodules.self_attention, config=config, layer_number=layer)


def turned(x, position, base=10000, exponents=0.0):
    """Rotate pairs of adjacent channels of x [..., ROTARY] by the angles of one position.

    Returns the first of all pairs, then the second: queries and keys in one order score the same.
    """
    if x.shape[-1] == 0:
        return x
    half = ROTARY // 2
    angle = position / base ** (torch.arange(half).double() * 2 / ROTARY) * math.e**exponents
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


def rms_norm(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(
    ("q_lora_rank", "fields"),
    [
        (None, {}),
        (14, {}),
        (None, {"rotary_interleaved": True}),
        (None, {"scalable_softmax": True}),
        (14, {"rotary_exponents": True}),
        (None, {"no_rope_freq": [1], "no_rope_latent_keys": True}),
    ],
    ids=str,
)
def test_a_head_attends_as_in_section_2_1_of_the_paper(q_lora_rank, fields):
    module = make_attention(q_lora_rank, **fields)
    s = 7
    x = torch.randn(s, 1, 24)
    exponents, scale, bias = torch.zeros(1), torch.zeros(HEADS), torch.ones(HEADS)
    if "rotary_exponents" in fields:
        exponents = module.rotary.exponents.normal_(0, 0.5)
    if "scalable_softmax" in fields:
        scale = module.query_scale.scale.data.normal_(0, 0.5)
        bias = module.query_scale.bias.data.normal_(1, 0.5)
    # Without a rotary part all channels of keys are made from the latents.
    plain = PLAIN + ROTARY if "no_rope_latent_keys" in fields else PLAIN
    found = module(x, None)[0]
    w = {name: p.detach().double() for name, p in module.named_parameters()}
    h = x[:, 0].double()
    if q_lora_rank is None:
        queries = h @ w["linear_q_proj.weight"].T
    else:
        latent = rms_norm(h @ w["linear_q_down_proj.weight"].T)
        queries = latent @ w["linear_q_up_proj.weight"].T
    joined = h @ w["linear_kv_down_proj.weight"].T
    up = rms_norm(joined[:, :LATENT]) @ w["linear_kv_up_proj.weight"].T
    shared = torch.stack([turned(joined[t, LATENT:], t, exponents=exponents) for t in range(s)])
    heads = []
    for head in range(HEADS):
        q = queries.view(s, HEADS, -1)[:, head]
        key_part, value = up.view(s, HEADS, -1)[:, head].split([plain, VALUE], -1)
        out = torch.zeros(s, VALUE, dtype=torch.float64)
        for t in range(s):
            scores = key_part[: t + 1] @ q[t, :plain]
            scores += shared[: t + 1] @ turned(q[t, plain:], t, exponents=exponents)
            scores *= scale[head] * math.log(t + 1) + bias[head]
            weights = (scores / math.sqrt(PLAIN + ROTARY)).softmax(0)
            out[t] = weights @ value[: t + 1]
        heads.append(out)
    expected = torch.cat(heads, -1) @ w["linear_proj.weight"].T
    assert_close(found[:, 0], expected, FP32_REORDERED_SUM, "output")


def test_the_exponents_of_frequencies_keep_fp32():
    module = make_attention(rotary_exponents=True)
    exponents = module.rotary.exponents.normal_()
    assert torch.equal(module.bfloat16().rotary.exponents, exponents)
    assert module.linear_proj.weight.dtype == torch.bfloat16


def test_a_layer_reads_the_latents_of_its_source():
    own, shares = make_attention(), make_attention(kv_source_layers=[0, 0], num_layers=2, layer=2)
    source = make_attention(kv_source_layers=[0, 0], num_layers=2)
    x, latents = torch.randn(5, 1, 24), {}
    source(x, None, keys_values=latents)
    found = shares(x, None, keys_values=latents)[0]
    state = shares.state_dict()
    own.load_state_dict(state | {n: w for n, w in source.state_dict().items() if n not in state})
    assert "linear_kv_down_proj.weight" not in state
    assert_close(found, own(x, None)[0], FP32_REORDERED_SUM, "output")
    found.square().sum().backward()
    assert source.linear_kv_down_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("sources", "fields", "named"),
    [
        ([0, 1], {}, "use --kv-source-layers"),
        ([0, 0, 1, 3], {}, "use --kv-source-layers"),
        ([0, 1, 0, 1], {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
         "layers 2 and 0, its source, are on two pipeline stages"),
        ([0, 0, 0, 0], {"no_rope_freq": [0, 1, 0, 0], "no_rope_latent_keys": True},
         "layers 1 and 0, its source, do not both rotate"),
        ([0, 0, 0, 0], {"recompute_granularity": "full", "recompute_num_layers": 1,
                        "recompute_method": "uniform"}, "--recompute-granularity"),
    ],
)  # fmt: skip
def test_latents_that_a_layer_cannot_read_are_refused(sources, fields, named):
    with pytest.raises(ConfigError, match=named):
        make_attention(num_layers=4, kv_source_layers=sources, **fields)


def test_halves_rotate_as_pairs_do_in_another_order_of_channels():
    pairs, halves = make_attention(), make_attention(rope_interleave=False)
    order = torch.cat((torch.arange(0, ROTARY, 2), torch.arange(1, ROTARY, 2)))
    with torch.no_grad():
        for (name, weight), kept in zip(pairs.named_parameters(), halves.parameters(), strict=True):
            kept.copy_(weight)
            if name == "linear_kv_down_proj.weight":
                kept[LATENT:] = weight[LATENT:][order]
            elif name == "linear_q_proj.weight":
                heads = kept.view(HEADS, PLAIN + ROTARY, -1)
                heads[:, PLAIN:] = heads[:, PLAIN:][:, order].clone()
    x = torch.randn(5, 1, 24)
    assert_close(halves(x, None)[0], pairs(x, None)[0], FP32_REORDERED_SUM, "output")


def test_gradients_reach_every_weight():
    module = make_attention(q_lora_rank=14, rope_type="yarn")
    x = torch.randn(5, 2, 24, requires_grad=True)
    module(x, None)[0].square().sum().backward()
    for name, parameter in [("input", x), *module.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_yarn_equals_another_implementation():
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=16384,
        rope_theta=10000.0,
        rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0,
        },
    )  # fmt: skip
    inverse, factor = rope.ROPE_INIT_FUNCTIONS["yarn"](llama, torch.device("cpu"))
    found = yarn_inverse_frequencies(
        64, 10000.0, factor=4.0, original_context=4096, beta_fast=32.0, beta_slow=1.0
    )
    assert_close(found, inverse, FP32_ROUNDED_ONCE, "inverse frequencies")
    assert yarn_attention_factor(4.0) == pytest.approx(factor)


@pytest.mark.parametrize("q_lora_rank", [None, 14])
def test_what_is_projected_up_can_be_dropped_until_backward(q_lora_rank):
    chosen = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    plain, again = make_attention(q_lora_rank), make_attention(q_lora_rank, **chosen)
    again.load_state_dict(plain.state_dict())
    kept, x = [], torch.randn(7, 2, 24)
    hook = again.core_attention.register_forward_hook(
        lambda module, inputs, output: kept.extend(inputs[:3])
    )
    outputs = [module(x.requires_grad_(), None)[0] for module in (plain, again)]
    assert [part.untyped_storage().nbytes() for part in kept] == [0, 0, 0]
    hook.remove()
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert_close(b.grad, a.grad, FP32_REORDERED_SUM, name)


def test_only_latents_are_projected_up():
    chosen = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    with pytest.raises(ConfigError, match="only multi-latent attention projects up from latents"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **chosen)
