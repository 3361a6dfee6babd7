"""Fused functions equal the plain formulas, forward and backward, and keep what they promise."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_geglu import (
    bias_geglu_impl,
    bias_quick_geglu_impl,
    geglu,
    quick_geglu,
)
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import (
    bias_swiglu_impl,
    swiglu,
    weighted_bias_swiglu_impl,
)
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax, scaled_masked_softmax
from megatron.core.kernels.vocab_softmax import BLOCK_BYTES
from megatron.core.parameters.keyed_draws import keyed_dropout
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.random_scope import SequenceShard
from tests.harness.tolerances import BF16_WHOLE_MODEL, FP32_ROUNDED_ONCE, assert_close

PLAIN_GATED = {
    swiglu: lambda gate, up: F.silu(gate) * up,
    geglu: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    quick_geglu: lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up,
}
BIASED = {swiglu: bias_swiglu_impl, geglu: bias_geglu_impl, quick_geglu: bias_quick_geglu_impl}


def gradients(function, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the gradients of a fixed random projection of it."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out.detach(), list(torch.autograd.grad(out, leaves, weight))


CALLS = {
    "without a bias": lambda function, x, bias, weights: function(x),
    "bias": lambda function, x, bias, weights: BIASED[function](x, bias),
    "weights": lambda function, x, bias, weights: weighted_bias_swiglu_impl(x, bias, weights),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "call"), [
    *((function, call) for function in PLAIN_GATED for call in ("without a bias", "bias")),
    (swiglu, "weights"),
])  # fmt: skip
def test_gated_activations_equal_the_plain_formula(function, call, dtype):
    inputs = [x.to(dtype) for x in (torch.randn(15, 24) * 2, torch.randn(24), torch.rand(15, 1))]

    def plain(x, bias, weights):
        x, bias, weights = x.float(), bias.float(), weights.float()
        out = PLAIN_GATED[function](*(x if call == "without a bias" else x + bias).chunk(2, -1))
        # Each input is in the graph, with a gradient of zero where the call leaves it out.
        return (out * weights if call == "weights" else out).to(dtype) + 0 * (bias.sum() + weights)

    def ours(*inputs):
        return CALLS[call](function, *inputs) + 0 * (inputs[1].sum() + inputs[2])

    tolerance = FP32_ROUNDED_ONCE if dtype is torch.float32 else BF16_WHOLE_MODEL
    (out, grads), (expected, expected_grads) = gradients(ours, *inputs), gradients(plain, *inputs)
    assert_close(out, expected, tolerance, "output")
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, tolerance, "gradient")


@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (7, 1, 6)])
def test_gated_activations_take_any_leading_shape(shape):
    x = torch.randn(shape, requires_grad=True)
    y = swiglu(x)
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_bias_gelu_is_the_tanh_form():
    x, bias = torch.randn(4, 2, 12), torch.randn(12)
    y = x + bias
    inner = 0.7978845608 * (y + 0.044715 * y**3)
    assert_close(bias_gelu_impl(x, bias), 0.5 * y * (1 + inner.tanh()), FP32_ROUNDED_ONCE, "gelu")
    assert torch.equal(bias_gelu_impl(y, None), fast_gelu(y))


@pytest.mark.parametrize("function", [squared_relu, quick_gelu, fast_gelu])
def test_activations_have_the_gradient_of_finite_differences(function):
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)


# Bias, dropout, residual --------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.0, 0.3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_bias_dropout_add_equals_its_parts(training, has_bias, probability):
    x, residual, bias = torch.randn(6, 2, 8), torch.randn(6, 2, 8), torch.randn(8)
    inputs = (x, residual, bias) if has_bias else (x, residual)
    fused = get_bias_dropout_add(training, True)

    def ours(x, residual, bias=None):
        with rng_state().in_scope("test", 1, rows=SequenceShard.full(6)):
            return fused((x, bias), residual, probability)

    def plain(x, residual, bias=None):
        with rng_state().in_scope("test", 1, rows=SequenceShard.full(6)):
            y = x if bias is None else x + bias
            return residual + keyed_dropout(y, probability, training)

    (out, grads), (expected, expected_grads) = gradients(ours, *inputs), gradients(plain, *inputs)
    assert_close(out, expected, FP32_ROUNDED_ONCE, "output")
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, FP32_ROUNDED_ONCE, "gradient")


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_an_fp32_residual_stays_fp32_and_gradients_keep_their_dtypes(probability):
    x = torch.randn(4, 2, 8).bfloat16().requires_grad_()
    bias = torch.randn(8).bfloat16().requires_grad_()
    residual = torch.randn(4, 2, 8, requires_grad=True)
    out = get_bias_dropout_add(True, True)((x, bias), residual, probability)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert (x.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert residual.grad.dtype == torch.float32


def test_bias_dropout_add_leaves_its_inputs_alone():
    x, residual, bias = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(8)
    before = [t.clone() for t in (x, residual, bias)]
    get_bias_dropout_add(True, True)((x, bias), residual, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, residual, bias), strict=True))


# Softmax ------------------------------------------------------------------------------------


class Kind:
    """Stands for a member of AttnMaskType."""

    def __init__(self, name: str) -> None:
        self.name = name


def plain_softmax(scores: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    scores = scores.float() * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -10000.0)
    return scores.softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_shape", [None, (1, 1, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_masked_softmax_equals_the_plain_formula(mask_shape, dtype):
    scores = torch.randn(2, 3, 5, 7).to(dtype)
    hidden = None if mask_shape is None else torch.rand(mask_shape) < 0.4
    out, grads = gradients(lambda s: scaled_masked_softmax(s, hidden, 0.3), scores)
    expected, expected_grads = gradients(lambda s: plain_softmax(s, hidden, 0.3).to(dtype), scores)
    tolerance = FP32_ROUNDED_ONCE if dtype is torch.float32 else BF16_WHOLE_MODEL
    assert_close(out, expected, tolerance, "probabilities")
    assert_close(grads[0], expected_grads[0], tolerance, "gradient")


@pytest.mark.parametrize("budget", [4, 64, 2**20])
def test_masked_softmax_does_not_depend_on_its_blocks(monkeypatch, budget):
    scores, hidden = torch.randn(2, 3, 5, 7), torch.rand(2, 1, 5, 7) < 0.4
    expected = scaled_masked_softmax(scores, hidden, 0.3)
    monkeypatch.setitem(BLOCK_BYTES, "cpu", budget)
    assert torch.equal(scaled_masked_softmax(scores, hidden, 0.3), expected)


@pytest.mark.parametrize("window", [None, (1, 0), (0, 0)])
def test_causal_softmax_module_sees_the_past_inside_the_window(window):
    softmax = FusedScaleMaskSoftmax(
        False, False, Kind("causal"), True, None, True, None, window_size=window
    )
    probabilities = softmax(torch.zeros(1, 1, 3, 5), None)[0, 0]
    visible = probabilities > 1e-6
    # The last query sits at the last key; queries are at positions 2, 3, 4.
    for row, position in enumerate((2, 3, 4)):
        first = 0 if window is None else position - window[0]
        assert visible[row].nonzero().flatten().tolist() == list(range(first, position + 1))


def test_a_row_without_visible_keys_is_uniform():
    softmax = FusedScaleMaskSoftmax(False, False, Kind("padding"), True, None, True, 1.0)
    out = softmax(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4, dtype=torch.bool))
    assert torch.equal(out, torch.full((1, 1, 2, 4), 0.25))
