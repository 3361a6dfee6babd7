"""Norms: values and gradients against fp64, facts on their parameters."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.norm import LayerNorm, RMSNorm
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import BF16_ROUNDED_ONCE, FP32_REORDERED_SUM, assert_close

EPSILON = 1e-5


def make_config(**fields):
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **fields)


def exact(norm, x, grad):
    """Return output and gradients of the norm's formula in fp64."""
    parameters = {n: p.detach().double().requires_grad_() for n, p in norm.named_parameters()}
    x = x.detach().double().requires_grad_()
    weight = parameters["weight"] + (1.0 if norm.zero_centered_gamma else 0.0)
    if isinstance(norm, LayerNorm):
        y = F.layer_norm(x, (x.shape[-1],), weight, parameters["bias"], norm.eps)
    else:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight
    y.backward(grad.double())
    return y, x.grad, {n: p.grad for n, p in parameters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("shape", [(7, 3, 32), (5, 2, 4, 8)])
def test_norm_equals_its_formula(kind, dtype, zero_centred, shape):
    norm = kind(shape[-1], EPSILON, zero_centered_gamma=zero_centred, dtype=dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x = (torch.randn(shape) * 2 + 0.5).to(dtype).requires_grad_()
    grad = torch.randn(shape).to(dtype)
    y = norm(x)
    y.backward(grad)
    expected, grad_x, grads = exact(norm, x, grad)
    tolerance = FP32_REORDERED_SUM if dtype == torch.float32 else BF16_ROUNDED_ONCE
    assert y.dtype == dtype
    assert_close(y, expected, tolerance, "output")
    if dtype == torch.float32:
        assert_close(x.grad, grad_x, tolerance, "input gradient")
        for name, parameter in norm.named_parameters():
            assert_close(parameter.grad, grads[name], tolerance, f"gradient of {name}")
    else:
        for name, parameter in norm.named_parameters():
            error = (parameter.grad.double() - grads[name]).norm() / grads[name].norm()
            assert error < 6e-3, f"gradient of {name}: a few roundings to bf16, {error}"
        error = (x.grad.double() - grad_x).norm() / grad_x.norm()
        assert error < 6e-3, f"input gradient: {error}"


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_wide_row_is_normed_as_accurately_as_a_narrow_one(kind):
    norm = kind(2**16)
    x = torch.randn(16, 2**16, generator=torch.Generator().manual_seed(0))
    expected, _, _ = exact(norm, x, torch.ones_like(x))
    error = (norm(x).double() - expected).norm() / expected.norm()
    assert error < 2**-23, f"{error}; sums of a row in few parts would give 2e-7"


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_parameter_gradients_of_many_bf16_rows_do_not_lose_precision(kind):
    norm = kind(64, dtype=torch.bfloat16)
    x, grad = (torch.randn(8192, 64).bfloat16() for _ in range(2))
    norm(x).backward(grad)
    _, _, grads = exact(norm, x, grad)
    for name, parameter in norm.named_parameters():
        error = (parameter.grad.double() - grads[name]).norm() / grads[name].norm()
        assert error < 6e-3, f"{name}: {error}; a bf16 accumulator would give 0.1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_strided_inputs_and_gradients_give_the_bits_of_contiguous_ones(kind, dtype):
    norm = kind(8, dtype=dtype)
    # A key head inside a packed projection, and a gradient that arrives transposed.
    view = torch.randn(5, 2, 4, 3, 8).to(dtype)[..., 1, :]
    grad = torch.randn(2, 5, 4, 8).to(dtype).transpose(0, 1)
    results = []
    for x, g in ((view, grad), (view.contiguous(), grad.contiguous())):
        x = x.detach().requires_grad_()
        norm.zero_grad()
        y = norm(x)
        y.backward(g)
        results.append((y, x.grad, norm.weight.grad))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_zero_centred_norm_starts_at_zero_and_acts_as_identity_scale():
    norm = WrappedTorchNorm(make_config(layernorm_zero_centered_gamma=True), 16)
    assert not norm.weight.any()
    x = torch.randn(3, 16)
    assert torch.equal(norm(x), F.layer_norm(x, (16,), eps=1e-5))


def test_an_unknown_norm_is_refused_with_the_known_ones():
    config = make_config()
    config.normalization = "BatchNorm"
    with pytest.raises(ConfigError, match="LayerNorm, LayerNormWithoutBias, RMSNorm"):
        WrappedTorchNorm(config, 16)


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_norm_without_weight_divides_by_the_root_mean_square(is_exact):
    config = make_config(
        normalization="RMSNormWithoutWeight",
        layout_invariant_mode=is_exact,
        layernorm_zero_centered_gamma=True,
    )
    norm = WrappedTorchNorm(config, 16, EPSILON)
    assert not list(norm.parameters())
    x, grad = torch.randn(5, 2, 16, requires_grad=True), torch.randn(5, 2, 16)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
    assert_close(norm(x), expected, FP32_REORDERED_SUM, "output")
    ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (norm(x), expected))
    assert_close(ours, theirs, FP32_REORDERED_SUM, "input gradient")
