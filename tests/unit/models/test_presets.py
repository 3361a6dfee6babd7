"""Presets: sizes of published models."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.presets import preset, preset_names


def count(chosen) -> int:
    """Count parameters from the definition of the architecture."""
    c, tied = chosen.config, chosen.model["share_embeddings_and_output_weights"]
    h, d, n = c["hidden_size"], c["kv_channels"], c["num_attention_heads"]
    g, f = c.get("num_query_groups", n), c["ffn_hidden_size"]
    is_gpt = c.get("normalization", "LayerNorm") == "LayerNorm"
    norm = 2 * h if is_gpt else h
    qkv = (n + 2 * g) * d
    layer = 2 * norm + h * qkv + n * d * h + h * f * (3 if c.get("gated_linear_unit") else 2)
    if c.get("add_bias_linear", True):
        layer += qkv + h + f + h
    elif c["add_qkv_bias"]:
        layer += qkv
    if c.get("qk_layernorm"):
        layer += 2 * d
    positions = chosen.model["max_sequence_length"] * h if is_gpt else 0
    return c["num_layers"] * layer + norm + positions + chosen.vocab_size * h * (1 if tied else 2)


@pytest.mark.parametrize(
    "name", ["gpt2-124m", "llama2-7b", "mistral-7b-v0.1", "qwen2.5-0.5b", "qwen3-0.6b"]
)
def test_a_shrunken_preset_builds_and_runs(name):
    chosen = preset(name)
    config = chosen.transformer_config(
        num_layers=1, hidden_size=32, num_attention_heads=4, kv_channels=8, ffn_hidden_size=48,
        unpadded_vocab_size=50,
        **({"num_query_groups": 2} if "num_query_groups" in chosen.config else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    model = GPTModel(config, spec, vocab_size=64, **(chosen.model | {"max_sequence_length": 16}))
    assert model(torch.zeros(1, 8, dtype=torch.long), None, None).shape == (1, 8, 64)
    shrunken = sum(p.numel() for p in model.parameters())
    sizes = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8,
        "ffn_hidden_size": 48, "num_query_groups": config.num_query_groups,
    }  # fmt: skip
    from dataclasses import replace

    small = replace(
        chosen,
        config=chosen.config | sizes,
        model=chosen.model | {"max_sequence_length": 16},
        vocab_size=64,
    )
    assert shrunken == count(small)


def test_every_preset_makes_a_valid_config_that_overrides_can_change():
    for name in preset_names():
        config = preset(name).transformer_config()
        assert config.unpadded_vocab_size == preset(name).vocab_size
    assert preset("llama3-8b").transformer_config(num_layers=2).num_layers == 2
    assert preset("gpt2-124m").padded_vocab_size(tensor_parallel_size=2) == 50432


@pytest.mark.parametrize("spelling", ["LLAMA3-8B", "llama3_8b"])
def test_spelling_of_names_is_forgiving(spelling):
    assert preset(spelling).name == "llama3-8b"


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [("lama3-8b", "llama3-8b"), ("gpt2", "gpt2-"), ("qwen3-9b", "qwen3-8b")],
)
def test_an_unknown_preset_gets_a_suggestion(wrong, suggestion):
    with pytest.raises(ConfigError, match=f"did you mean .*{suggestion}"):
        preset(wrong)
