"""GPTModel gives the logits, losses and gradients of independently written models."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.plain_gpt import PlainGPT2, PlainLlama, Sizes
from megatron.core.activations import fast_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.models import weight_maps

HIDDEN, HEADS, GROUPS, FFN, VOCAB, LENGTH = 32, 4, 2, 48, 77, 24


def gpt2_model(**fields):
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN,
        activation_func=fast_gelu, hidden_dropout=0.0, attention_dropout=0.0, **fields,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(), VOCAB, LENGTH, share_embeddings_and_output_weights=True
    )


def llama_model(spec_options=None, model_options=None, **fields):
    config = TransformerConfig(
        **{
            "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
            "num_query_groups": GROUPS, "ffn_hidden_size": FFN, "activation_func": F.silu,
            "gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, **fields,
        }
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(**(spec_options or {}))
    options = {"position_embedding_type": "rope", **(model_options or {})}
    return GPTModel(config, spec, VOCAB, LENGTH, **options)


def load(model, state):
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing
    return model


def batch():
    text = torch.randint(VOCAB, (2, LENGTH + 1))
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize("fused_head", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loss_and_gradients_equal_those_of_a_plain_model(family, fused_head):
    z = Sizes(2, HIDDEN, HEADS, HEADS if family == "gpt2" else GROUPS, FFN, VOCAB, LENGTH)
    if family == "gpt2":
        plain = weight_maps.randomised(PlainGPT2(z))
        model = gpt2_model(cross_entropy_loss_fusion=fused_head)
        mapped = lambda m: weight_maps.from_plain_gpt2(m, HEADS)  # noqa: E731
    else:
        plain = weight_maps.randomised(PlainLlama(z))
        model = llama_model(cross_entropy_loss_fusion=fused_head)
        mapped = lambda m: weight_maps.from_plain_llama(m, GROUPS)  # noqa: E731
    load(model, mapped(plain))
    tokens, labels = batch()
    assert_close(model(tokens, None, None), plain.logits(tokens), FP32_REORDERED_SUM, "logits")

    loss = model(tokens, None, None, labels=labels)
    assert loss.shape == (2, LENGTH)
    expected = plain(tokens, labels)
    assert_close(loss.mean(), expected, FP32_REORDERED_SUM, "loss")
    loss.mean().backward()
    expected.backward()
    # The map of names is linear, so it maps gradients as it maps weights.
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.grad)
    gradients = mapped(plain)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name], FP32_REORDERED_SUM, f"gradient of {name}")


def test_logits_equal_hugging_faces_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=HEADS, n_inner=FFN, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = weight_maps.randomised(transformers.GPT2LMHeadModel(config)).eval()
    ours = load(gpt2_model(), weight_maps.from_hugging_face_gpt2(theirs)).eval()
    tokens, _ = batch()
    positions = torch.arange(LENGTH).unsqueeze(0)
    expected = theirs(tokens).logits
    assert_close(ours(tokens, positions, None), expected, FP32_REORDERED_SUM, "logits")
    assert_close(ours(tokens, None, None), expected, FP32_REORDERED_SUM, "without position ids")


LLAMA_FAMILY = {
    "Llama": ("Llama", {}, {}, {}),
    "Llama tied, wide heads": (
        "Llama", {"tie_word_embeddings": True, "head_dim": 16}, {"kv_channels": 16}, {},
    ),
    "Mistral": ("Mistral", {"sliding_window": 7}, {"window_size": (6, 0)}, {}),
    "Qwen2": ("Qwen2", {}, {"add_qkv_bias": True}, {}),
    "Qwen3": (
        "Qwen3", {"head_dim": 8}, {"qk_layernorm": True, "kv_channels": 8}, {"qk_layernorm": True},
    ),
    "gated layers of Qwen3-Next": (
        "Qwen3Next",
        {"head_dim": 16, "layer_types": ["full_attention"] * 2, "mlp_only_layers": [0, 1],
         "partial_rotary_factor": 0.5},
        {"qk_layernorm": True, "kv_channels": 16, "attention_output_gate": True,
         "layernorm_zero_centered_gamma": True},
        {"qk_layernorm": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(LLAMA_FAMILY))
def test_logits_equal_those_of_hugging_faces_llama_family(name):
    transformers = pytest.importorskip("transformers")
    kind, their_fields, our_fields, spec_options = LLAMA_FAMILY[name]
    base, epsilon = 50000.0, 1e-6
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, max_position_embeddings=LENGTH,
        rms_norm_eps=epsilon, **({"tie_word_embeddings": False} | their_fields),
        rope_parameters={
            "rope_type": "default", "rope_theta": base,
            "partial_rotary_factor": their_fields.get("partial_rotary_factor", 1.0),
        },
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    of_norms = 0.0 if our_fields.get("layernorm_zero_centered_gamma") else 1.0
    theirs = weight_maps.randomised(theirs, of_norms).eval()
    model_options = {
        "rotary_base": base,
        "rotary_percent": their_fields.get("partial_rotary_factor", 1.0),
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }
    ours = llama_model(spec_options, model_options, layernorm_epsilon=epsilon, **our_fields)
    load(ours, weight_maps.from_hugging_face_llama(theirs)).eval()
    tokens, _ = batch()
    expected, logits = theirs(tokens).logits, ours(tokens, None, None)
    assert_close(logits, expected, FP32_REORDERED_SUM, "logits")
    direction = torch.randn_like(expected)
    expected.backward(direction)
    logits.backward(direction)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    gradients = weight_maps.from_hugging_face_llama(theirs)
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, gradients[name], FP32_REORDERED_SUM, f"gradient of {name}")
