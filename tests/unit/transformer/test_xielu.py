"""xIELU equals its formula, and its two scalars learn from all channels."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.xielu import XIELU
from tests.harness.tolerances import FP64_REORDERED_SUM, assert_close


def make(**fields):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64, **fields
    )
    return XIELU(config, SINGLE_RANK)


def formula(x, alpha_p, alpha_n, beta=0.5):
    """Equation of arXiv 2411.13010."""
    positive = F.softplus(alpha_p) * x**2 + beta * x
    negative = (beta + F.softplus(alpha_n)) * (x.exp() - 1 - x) + beta * x
    return torch.where(x > 0, positive, negative)


@pytest.mark.parametrize("exact", [False, True])
def test_values_and_gradients_are_those_of_the_formula(exact):
    activation = make(layout_invariant_mode=exact)
    with torch.no_grad():
        activation.alpha_p.fill_(-0.3)
        activation.alpha_n.fill_(0.7)
    torch.manual_seed(1)
    x = torch.randn(6, 2, 12, dtype=torch.float64, requires_grad=True)
    parameters = [x, activation.alpha_p, activation.alpha_n]
    ours, theirs = activation(x), formula(*parameters)
    assert_close(ours, theirs, FP64_REORDERED_SUM, "output")
    weight = torch.randn_like(x)
    pairs = zip(
        torch.autograd.grad((ours * weight).sum(), parameters),
        torch.autograd.grad((theirs * weight).sum(), parameters),
        strict=True,
    )
    for mine, other in pairs:
        # In layout-invariant mode the terms of a scalar's gradient are rounded to 2^-44.
        assert_close(mine, other, FP64_REORDERED_SUM, "gradient")


def test_the_slopes_begin_at_the_published_values():
    activation = make()
    assert F.softplus(activation.alpha_p).item() == pytest.approx(0.8)
    assert (activation.beta + F.softplus(activation.alpha_n)).item() == pytest.approx(0.8)
    assert (activation.beta.item(), activation.eps.item()) == (0.5, -1e-6)
