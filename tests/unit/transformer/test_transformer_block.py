"""Layers and stacks: recomputation, stages, checkpoint keys, custom parts."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
)
from megatron.core.parameters.rng import rng_state
from megatron.core.transformer.spec_utils import ModuleSpec, get_submodules
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from tests.harness.groups import fake_groups
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}


def make_config(**fields):
    defaults = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4}
    return TransformerConfig(**(defaults | fields))


def run(config, x, weight):
    """Return output and all gradients of a stack built from fixed weights."""
    torch.manual_seed(3)
    block = TransformerBlock(config, get_gpt_layer_local_spec())
    x = x.clone().requires_grad_()
    angles = torch.randn(x.shape[0], 1, 1, 4)
    rng_state().set_seed(5)
    out = block(x, None, rotary_pos_emb=angles)
    (out * weight).sum().backward()
    return {"out": out, "x": x.grad, **{n: p.grad for n, p in block.named_parameters()}}


RECOMPUTE = {
    "uniform by one": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "uniform by three": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3,
    },
    "first two": {
        "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2,
    },
    "core attention": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "all parts": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "layernorm"],
    },
    "norms and attention": {
        "recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"],
    },
}  # fmt: skip


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("name", list(RECOMPUTE))
def test_recomputation_changes_no_bit_of_any_gradient(name, family):
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    x, weight = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    torch.manual_seed(1)
    plain = run(make_config(**family, **dropout), x, weight)
    torch.manual_seed(1)
    recomputed = run(make_config(**family, **dropout, **RECOMPUTE[name]), x, weight)
    assert plain.keys() == recomputed.keys()
    for key, expected in plain.items():
        assert_close(recomputed[key], expected, EXACT, f"{key} with {name}")


def test_layers_of_a_stack_drop_different_elements_and_a_sample_always_the_same():
    config = make_config(num_layers=1, hidden_dropout=0.5, attention_dropout=0.0)
    block = TransformerBlock(config, get_gpt_layer_local_spec())
    x = torch.randn(8, 2, 16)
    rng_state().begin_step(40, micro_batch_size=2, dp_rank=0, dp_size=1)
    both = block(x, None)
    rng_state().begin_step(40, micro_batch_size=1, dp_rank=0, dp_size=1)
    first = block(x[:, :1], None)
    rng_state().set_microbatch(1)
    second = block(x[:, 1:], None)
    assert_close(torch.cat((first, second), 1), both, FP32_REORDERED_SUM, "micro batches of one")
    rng_state().set_microbatch(0)
    other = block(x[:, 1:], None)
    assert not torch.allclose(other, second)


def test_checkpoint_keys_stack_the_layers_and_name_norms_after_the_linear_behind_them():
    config = make_config(pipeline_model_parallel_size=2)
    groups = fake_groups(pp=(1, 2))
    block = TransformerBlock(config, get_gpt_layer_local_spec(), pg_collection=groups)
    declared = block.sharded_state_dict("decoder.")
    norm = declared["decoder.layers.0.input_layernorm.weight"]
    assert norm.key == "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert norm.global_shape == (4, 16)
    assert norm.global_offset == (2, 0)
    separate = block.sharded_state_dict("decoder.", (), {"non_homogeneous_layers": True})
    weight = separate["decoder.layers.1.mlp.linear_fc2.weight"]
    assert weight.key == "decoder.layers.3.mlp.linear_fc2.weight"
    assert weight.global_shape == (16, 64)


class Doubling(torch.nn.Module):
    """A part that takes whatever a layer passes."""

    def __init__(self, config, **kwargs):
        super().__init__()

    def forward(self, x, *args, **kwargs):
        return 2 * x, None


class AddContext(Doubling):
    def forward(self, x, attention_mask=None, key_value_states=None):
        return key_value_states, None


def test_a_layer_of_identities_returns_its_input():
    layer = TransformerLayer(make_config(), TransformerLayerSubmodules())
    x = torch.randn(4, 1, 16)
    hidden, context = layer(x)
    assert torch.equal(hidden, x)
    assert context is None


def test_custom_parts_and_cross_attention_are_called_where_the_spec_puts_them():
    add = get_submodules(get_gpt_layer_local_spec()).mlp_bda
    layer = TransformerLayer(
        make_config(hidden_dropout=0.0),
        TransformerLayerSubmodules(
            self_attention=ModuleSpec(Doubling),
            self_attn_bda=add,
            cross_attention=ModuleSpec(AddContext),
            cross_attn_bda=add,
        ),
    )
    x, context = torch.randn(4, 1, 16), torch.randn(4, 1, 16)
    hidden, _ = layer(x, context=context)
    assert_close(hidden, 3 * x + context, FP32_REORDERED_SUM, "x + 2x + context")


def test_layers_without_rotary_positions_ignore_the_angles():
    config = make_config(no_rope_freq=[1, 0, 1, 0], num_layers=4)
    block = TransformerBlock(config, get_gpt_layer_local_spec())
    assert [layer.self_attention.uses_rotary for layer in block.layers] == [
        False, True, False, True,
    ]  # fmt: skip
