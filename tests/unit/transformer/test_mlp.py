"""The MLP: every activation, gated or not, gives its formula."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import mlp as mlp_module
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, FP32_ROUNDED_ONCE, assert_close


def make_mlp(**fields):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, **fields
    )
    mlp = MLP(config, get_submodules(get_submodules(get_gpt_layer_local_spec()).mlp))
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_()
    return mlp


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [F.gelu, F.silu, fast_gelu, quick_gelu, squared_relu])
def test_mlp_equals_its_formula(activation, gated, bias, fused):
    mlp = make_mlp(
        activation_func=activation,
        gated_linear_unit=gated,
        add_bias_linear=bias,
        bias_activation_fusion=fused,
    )
    x = torch.randn(5, 2, 8, requires_grad=True)
    out, out_bias = mlp(x)
    inner = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias)
    if gated:
        gate, up = inner.chunk(2, -1)
        inner = activation(gate) * up
    else:
        inner = activation(inner)
    expected = F.linear(inner, mlp.linear_fc2.weight)
    assert_close(out, expected, FP32_REORDERED_SUM, "output")
    assert (out_bias is not None) == bias
    weight = torch.randn_like(out)
    parameters = [x, mlp.linear_fc1.weight, mlp.linear_fc2.weight]
    for ours, theirs in zip(
        torch.autograd.grad((out * weight).sum(), parameters),
        torch.autograd.grad((expected * weight).sum(), parameters),
        strict=True,
    ):
        assert_close(ours, theirs, FP32_REORDERED_SUM, "gradient")


def test_a_scale_per_token_multiplies_the_activation():
    mlp = make_mlp(add_bias_linear=False)
    x, scale = torch.randn(5, 2, 8), torch.rand(5, 2)
    assert_close(
        mlp(x, scale)[0], mlp(x)[0] * scale.unsqueeze(-1), FP32_REORDERED_SUM, "scaled output"
    )


def test_input_and_inner_sizes_can_differ_from_the_config():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    parts = get_submodules(get_submodules(get_gpt_layer_local_spec()).mlp)
    mlp = MLP(config, parts, input_size=6, ffn_hidden_size=10)
    assert mlp(torch.randn(3, 1, 6))[0].shape == (3, 1, 8)
    assert mlp.linear_fc1.weight.shape == (10, 6)


def test_a_gate_may_be_clamped_after_its_nonlinearity():
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, gated_linear_unit=True,
        activation_func=F.silu, activation_func_clamp_value=0.7, activation_func_clamp_after=True,
    )  # fmt: skip
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(3)) * 3
    gate, up = x.chunk(2, -1)
    expected = torch.minimum(F.silu(gate), torch.tensor(0.7)) * up.clamp(-0.7, 0.7)
    assert_close(mlp_module.gated(x, F.silu, config), expected, FP32_ROUNDED_ONCE, "gated MLP")


def test_a_bounded_gate_with_an_offset_is_that_of_gpt_oss():
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, gated_linear_unit=True,
        activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=7.0,
    )  # fmt: skip
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(3)) * 8
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    assert_close(mlp_module.gated(x, quick_gelu, config), expected, FP32_ROUNDED_ONCE, "gated MLP")
