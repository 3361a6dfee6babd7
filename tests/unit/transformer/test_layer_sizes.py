"""Sizes by layer: blocks in JSON, the layers built from them, their parameters and operations."""

import json

import pytest
import torch
import torch.nn.functional as F

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config.layer_kinds import DENSE, LINEAR, NOTHING
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.metrics.flops import training_flops_per_token
from megatron.training.metrics.model_size import ModelSize
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

VOCAB, LENGTH = 64, 12
NARROW = {"attention": {"num_query_groups": 1}, "ffn": {"ffn_hidden_size": 24}}
WIDE = {
    "attention": {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 6,
                  "window_size": [3, 0], "rotary_base": 500},
    "ffn": {"ffn_hidden_size": 40},
}  # fmt: skip
WITHOUT_MLP = {"attention": {"window_size": None}, "ffn": {"no_op": True}}
LINEARS = {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}}
EMPTY = {"attention": {"no_op": True}, "ffn": {"no_op": True}}


def blocks(*given, **others):
    return json.dumps({"block_configs": given, **others})


def make_config(*given, **fields):
    return TransformerConfig(
        **{
            "num_layers": len(given), "hidden_size": 16, "num_attention_heads": 4,
            "ffn_hidden_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
            "add_bias_linear": False,
            "heterogeneous_layers_config_encoded_json": blocks(*given), **fields,
        }
    )  # fmt: skip


def make_model(config, **options):
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    options = {"position_embedding_type": "rope", "rotary_base": 100, **options}
    return GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, **options)


def test_a_block_of_nemotron_nas_gives_the_sizes_of_its_paper():
    # Nemotron 51B is searched from Llama 3 70B: 8192 wide, 64 query heads, MLPs of 28672.
    published = {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False}
    config = make_config(
        {"attention": {"n_heads_in_group": 8, "no_op": False, "window_length": None, **published},
         "ffn": {"ffn_mult": 5.25, "no_op": False, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True, **published},
         "ffn": {"ffn_mult": 1.3125, "sparsify": None}},
        {"attention": {"n_heads_in_group": 16, **published},
         "ffn": {"ffn_mult": 0.1, "no_op": False}},
        {"attention": {"replace_with_linear": True, "n_heads_in_group": None},
         "ffn": {"no_op": True, "ffn_mult": None}},
        hidden_size=8192, num_attention_heads=64,
    )  # fmt: skip
    views = [config.of_layer(layer) for layer in range(1, 5)]
    assert [view.num_query_groups for view in views] == [8, 64, 4, 64]
    # 2/3 * 0.1 * 8192 is 546, and 768 the next multiple of 256.
    assert [view.ffn_hidden_size for view in views] == [28672, 7168, 768, 32]
    kinds = config.layer_kinds()
    assert [kind.attends for kind in kinds] == [True, False, True, False]
    assert [kind.mixer for kind in kinds[1::2]] == [NOTHING, LINEAR]
    assert [kind.mlp for kind in kinds] == [DENSE, DENSE, DENSE, NOTHING]


def test_layers_compute_what_models_of_their_size_alone_compute():
    torch.manual_seed(0)
    mixed = make_model(make_config(WIDE, NARROW))
    alone = (
        make_model(
            make_config({"attention": {}, "ffn": {}}, num_attention_heads=8, num_query_groups=4,
                        kv_channels=6, window_size=(3, 0), ffn_hidden_size=40),
            rotary_base=500,
        ),
        make_model(make_config({"attention": {}, "ffn": {}}, num_query_groups=1,
                               ffn_hidden_size=24)),
    )  # fmt: skip
    states = torch.randn(LENGTH, 2, 16)
    mixed.decoder.final_layernorm = None
    found = mixed.decoder(states, None, **mixed._rotary_args(LENGTH))
    expected = states
    for model, layer in zip(alone, mixed.decoder.layers, strict=True):
        model.decoder.final_layernorm = None
        model.decoder.layers[0].load_state_dict(layer.state_dict())
        expected = model.decoder(expected, None, **model._rotary_args(LENGTH))
    assert_close(found, expected, FP32_REORDERED_SUM, "two layers of different sizes")


def test_a_matrix_in_place_of_attention_and_of_the_mlp_is_the_formula_and_nothing_is_nothing():
    model = make_model(make_config(LINEARS, EMPTY))
    model.decoder.final_layernorm = None
    layer, x = model.decoder.layers[0], torch.randn(LENGTH, 2, 16)
    expected = x
    for norm, part in (
        (layer.input_layernorm, layer.self_attention),
        (layer.pre_mlp_layernorm, layer.mlp),
    ):
        scale = expected.pow(2).mean(-1, keepdim=True).add(model.config.layernorm_epsilon).rsqrt()
        expected = expected + (expected * scale * norm.weight) @ part.weight.T
    found = model.decoder(x, None, **model._rotary_args(LENGTH))
    assert_close(found, expected, FP32_REORDERED_SUM, "x + W norm(x), twice")


EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [1, 0, 1],
    "moe_ffn_hidden_size": 8,
}  # fmt: skip


def test_a_layer_that_shares_keys_has_no_parameters_and_no_products_of_them():
    config = make_config(NARROW, NARROW, NARROW, num_kv_shared_layers=2, qk_layernorm=True)
    size = ModelSize(config=config, vocab_size=VOCAB, seq_length=LENGTH)
    model = make_model(config, share_embeddings_and_output_weights=True)
    assert size.total_parameters == sum(p.numel() for p in model.parameters())
    own, shared = (size.of_layer(layer).token_products(size.layer_kinds[0]) for layer in (1, 2))
    assert own - shared == config.hidden_size * 2 * config.kv_channels


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ((WIDE, NARROW, WITHOUT_MLP, LINEARS, EMPTY), {}),
        ((WIDE, {"attention": {"attention_k_eq_v": True}, "ffn": {}}, WIDE), {
            "per_layer_embed_dim": 6, "qk_layernorm": True, "layer_scalar": True}),
        ((LINEARS, WIDE), {"add_bias_linear": True, "qk_layernorm": True, "sandwich_norm": True}),
        (({"attention": {}, "ffn": {"num_moe_experts": 8, "moe_router_topk": 3}}, NARROW,
          {"attention": {}, "ffn": {"moe_ffn_hidden_size": 12}}), EXPERTS),
    ],
)  # fmt: skip
def test_parameters_are_counted_and_operations_are_the_sum_over_layers(given, fields):
    config = make_config(*given, **fields)
    size = ModelSize(config=config, vocab_size=VOCAB, seq_length=LENGTH)
    model = make_model(config, share_embeddings_and_output_weights=True)
    assert size.total_parameters == sum(p.numel() for p in model.parameters())

    def of_layers(block, freq):
        own = {**fields, "moe_layer_freq": [freq] * 3} if fields.get("num_moe_experts") else fields
        return ModelSize(
            config=make_config(*[block] * 3, **own), vocab_size=VOCAB, seq_length=LENGTH
        )

    has_experts = fields.get("moe_layer_freq", [0] * len(given))
    head = training_flops_per_token(of_layers(EMPTY, 0))
    layers = [
        (training_flops_per_token(of_layers(block, freq)) - head) / 3
        for block, freq in zip(given, has_experts, strict=True)
    ]
    assert training_flops_per_token(size) == pytest.approx(head + sum(layers))


@pytest.mark.parametrize(
    ("given", "fields", "named"),
    [
        ((NARROW,), {"num_layers": 2}, "use --num-layers 1"),
        (({"attention": {"num_heads": 4}, "ffn": {}},), {}, "attention.num_heads = 4"),
        (({"attention": {"num_sink_tokens": 4}, "ffn": {}},), {}, "num_sink_tokens"),
        (({"attention": {"window_length": 64}, "ffn": {}},), {}, "window_length"),
        (({"attention": {}, "ffn": {"ffn_hidden_size": -1}},), {}, "ffn_hidden_size = -1"),
        (({"attention": {}, "ffn": {"ffn_hidden_size": True}},), {}, "ffn_hidden_size = True"),
        (({"attention": {"n_heads_in_group": 3}, "ffn": {}},), {}, "layer 1: .*num_query_groups=0"),
        (({"attention": {}, "ffn": {"num_moe_experts": 4}},), {}, "layer 1: .*num_moe_experts"),
        (({"attention": {}, "ffn": {"ffn_hidden_size": 8}},),
         {**EXPERTS, "moe_layer_freq": [1]}, "layer 1: .*ffn_hidden_size"),
        ((NARROW, {"attention": {"kv_channels": 8}, "ffn": {}}), {"softmax_scale": 0.5},
         "add softmax_scale to the attention"),
        ((NARROW, {"attention": {"num_attention_heads": 6}, "ffn": {}}),
         {"tensor_model_parallel_size": 4, "num_query_groups": 2},
         "layer 2: num_attention_heads=6"),
        ((NARROW, {"attention": {}, "ffn": {"ffn_hidden_size": 30}}),
         {"tensor_model_parallel_size": 4}, "layer 2: ffn_hidden_size=30"),
        ((NARROW, {"attention": {"num_attention_heads": 2, "num_query_groups": 2}, "ffn": {}}),
         {"context_parallel_size": 4, "cp_comm_type": "a2a"}, "layer 2: 2 query heads"),
        (({"attention": {}, "ffn": {"num_moe_experts": 6, "moe_router_topk": 2}},),
         {**EXPERTS, "moe_layer_freq": [1], "expert_model_parallel_size": 4}, "layer 1: 6 experts"),
        ((WIDE,), {"mtp_num_layers": 1}, "layer 1 rotates by its own angles"),
        ((NARROW,), {"hybrid_layer_pattern": "*"}, "drop --hybrid-layer-pattern"),
    ],
)  # fmt: skip
def test_what_a_layer_cannot_be_is_refused_by_its_number(given, fields, named):
    with pytest.raises(ConfigError, match=f"(?s){named}"):
        make_config(*given, **fields)


@pytest.mark.parametrize("text", ["{", "[]", '{"block_configs": [{"attention": {}}]}', "3"])
def test_text_that_is_no_list_of_blocks_is_refused_with_its_form(text):
    with pytest.raises(ConfigError, match="block_configs"):
        make_config(NARROW, heterogeneous_layers_config_encoded_json=text)


def test_a_file_is_read_and_a_missing_file_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(blocks(WIDE, NARROW, hidden_act="silu", rope_scaling=None))
    fields = {"heterogeneous_layers_config_encoded_json": None}
    found = make_config(WIDE, NARROW, heterogeneous_layers_config_path=str(path), **fields)
    assert found.of_layer(1).num_attention_heads == 8
    with pytest.raises(ConfigError, match="--heterogeneous-layers-config-path"):
        make_config(NARROW, heterogeneous_layers_config_path=str(tmp_path / "none"), **fields)
