"""Hybrid models: groups of letters, the class under both names, patterns under Megatron's names."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    get_hybrid_layer_counts,
    get_hybrid_total_layer_count,
    get_hybrid_total_pipeline_segment_count,
    parse_hybrid_pattern,
)
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel, MambaModel
from megatron.core.transformer.config.layer_kinds import (
    ATTENTION,
    DENSE,
    EXPERTS,
    MAMBA,
    NOTHING,
    LayerKind,
    hybrid_pattern,
)
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from tests.harness.tolerances import EXACT, assert_close

SIZES = dict(
    hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, normalization="RMSNorm",
    hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float64,
)  # fmt: skip
TOKENS = torch.arange(24).view(2, 12) % 20


def hybrid(pattern: str, kind: type = HybridModel, **options) -> HybridModel:
    config = TransformerConfig(num_layers=len(hybrid_pattern(pattern).kinds), **SIZES)
    options = {"hybrid_stack_spec": hybrid_stack_spec} | options
    return kind(
        config=config, vocab_size=32, max_sequence_length=12, hybrid_layer_pattern=pattern,
        position_embedding_type="rope", **options,
    )  # fmt: skip


def gpt(num_layers: int) -> GPTModel:
    config = TransformerConfig(num_layers=num_layers, **SIZES)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return GPTModel(config, spec, 32, 12, position_embedding_type="rope")


def test_a_group_is_one_layer_with_a_mixer_and_an_mlp() -> None:
    pattern = hybrid_pattern("M[*-]|[ME]-/[*E]/*E")
    alone, joined = LayerKind(MAMBA, NOTHING), LayerKind(ATTENTION, DENSE)
    assert pattern.stages == (
        (alone, joined),
        (LayerKind(MAMBA, EXPERTS), LayerKind(NOTHING, DENSE)),
    )
    assert [len(depth) for depth in pattern.later] == [1, 2]
    assert pattern.pipeline_layout == "Ett|ttmmL"
    assert pattern.layers_with_experts == [0, 0, 1, 0]


@pytest.mark.parametrize("text", ["[*]", "[-*]", "[M*-]", "[*-", "*-]", "[M|-]", "[*/-]", "M\n-"])
def test_a_group_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="hybrid_layer_pattern"):
        hybrid_pattern(text)


@pytest.mark.parametrize("pattern", ["*-*-", "[*-][*-]", "[*-]*-"])
def test_letters_and_groups_compute_what_a_gpt_of_the_same_weights_computes(pattern: str) -> None:
    model, other = hybrid(pattern), gpt(2)
    weights = dict(zip(other.state_dict(), model.state_dict().values(), strict=True))
    other.load_state_dict(weights)
    found, expected = (each(TOKENS, None, None, labels=TOKENS) for each in (model, other))
    assert_close(found, expected, EXACT, what="losses")


COMPRESSED = SIZES | dict(
    q_lora_rank=6, kv_lora_rank=6, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=6,
    qk_layernorm=True, window_size=(3, 0), o_groups=2, o_lora_rank=4, add_bias_linear=False,
    dsa_indexer_n_heads=2, dsa_indexer_head_dim=4, dsa_indexer_topk=1, csa_indexed_ratio=2,
)  # fmt: skip


def compressed(**fields) -> MLATransformerConfig:
    return MLATransformerConfig(**COMPRESSED, **fields)


def test_letters_of_compressed_attention_compute_what_ratios_of_layers_compute() -> None:
    config = compressed(num_layers=5, csa_compress_ratios=3, hybrid_layer_pattern="[W-]C-H-")
    model = HybridModel(config, hybrid_stack_spec, 32, 12)
    as_gpt = compressed(
        num_layers=3, csa_compress_ratios=[0, 2, 3], experimental_attention_variant="dsv4_hybrid"
    )
    spec = get_gpt_decoder_block_spec(as_gpt, use_transformer_engine=False)
    other = GPTModel(as_gpt, spec, 32, 12, position_embedding_type="none")
    weights = dict(zip(other.state_dict(), model.state_dict().values(), strict=True))
    other.load_state_dict(weights)
    found, expected = (each(TOKENS, None, None, labels=TOKENS) for each in (model, other))
    assert_close(found, expected, EXACT, what="losses")


def test_letters_have_the_ratios_of_deepseek_v4_also_for_later_tokens() -> None:
    config = compressed(num_layers=3, hybrid_layer_pattern="H[C-]W/H-")
    assert [kind.compress_ratio for kind in config.layer_kinds()] == [128, 2, 0]
    assert [kind.compress_ratio for kind in config.prediction_kinds()[0]] == [128, 0]


def test_ratios_of_layers_beside_letters_are_refused() -> None:
    with pytest.raises(ConfigError, match="the layers H of the pattern have one ratio"):
        compressed(num_layers=2, csa_compress_ratios=[0, 0], hybrid_layer_pattern="W-")


def test_layers_of_later_tokens_are_those_of_the_pattern() -> None:
    model = hybrid("*-/*-/[*-]")
    names = [name for name, _ in model.mtp.named_modules() if name.endswith("linear_fc1")]
    assert names == [
        "layers.0.transformer_layer.layers.1.mlp.linear_fc1",
        "layers.1.transformer_layer.mlp.linear_fc1",
    ]


def test_the_former_names_make_the_same_model() -> None:
    from megatron.core.models.mamba import MambaModel as imported
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    assert imported is MambaModel and mamba_stack_spec is hybrid_stack_spec
    config = TransformerConfig(num_layers=2, **SIZES)
    model = MambaModel(
        config, mamba_stack_spec=mamba_stack_spec, vocab_size=32, max_sequence_length=12,
        hybrid_override_pattern="*-", position_embedding_type="rope",
    )  # fmt: skip
    assert isinstance(model, HybridModel)
    assert model.state_dict().keys() == hybrid("*-").state_dict().keys()


def test_two_patterns_for_one_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="HybridModel got the patterns"):
        hybrid("*-", hybrid_override_pattern="-*")


def test_patterns_are_counted_as_megatron_counts_them() -> None:
    """The examples are those of Megatron's documentation of these functions."""
    parsed = parse_hybrid_pattern("M-M-|M-M*-/MM/MM")
    assert (parsed.main_pattern, parsed.mtp_pattern) == ("M-M-|M-M*-", "MM")
    assert parsed.mtp_num_depths == 2
    counts = get_hybrid_layer_counts("M-M-|M-M*-/MM/MM")
    assert {letter: n for letter, n in counts.items() if n} == {"*": 1, "M": 8, "-": 4}
    assert get_hybrid_total_layer_count("M-M-|M-M*-/MM/MM") == 9
    assert get_hybrid_total_pipeline_segment_count("M-M-|M-M*-/MM/MM") == 2
    with pytest.raises(ConfigError, match="different layers"):
        parse_hybrid_pattern("M-/*/-")
