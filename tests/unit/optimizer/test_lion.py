"""Lion is its published algorithm."""

import torch

from megatron.core.optimizer.definitions.lion import Lion
from tests.harness.tolerances import EXACT, FP32_ROUNDED_ONCE, assert_close

LR, DECAY, BETAS = 1e-2, 0.3, (0.9, 0.99)


def test_lion_follows_the_formula_of_the_paper():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(7, 5, generator=generator)
    parameter = torch.nn.Parameter(weight.clone())
    rule = Lion([parameter], lr=LR, betas=BETAS, weight_decay=DECAY)
    weight, moment = weight.double(), torch.zeros(7, 5, dtype=torch.float64)
    for _ in range(6):
        gradient = torch.randn(7, 5, generator=generator)
        parameter.grad = gradient.clone()
        rule.step()
        interpolated = BETAS[0] * moment + (1 - BETAS[0]) * gradient
        weight = weight - LR * (interpolated.sign() + DECAY * weight)
        moment = BETAS[1] * moment + (1 - BETAS[1]) * gradient
        assert_close(parameter.detach(), weight, FP32_ROUNDED_ONCE, "weight")
        assert_close(rule.state[parameter]["exp_avg"], moment, FP32_ROUNDED_ONCE, "moment")


def test_parameters_without_gradient_stay():
    parameter = torch.nn.Parameter(torch.ones(3))
    Lion([parameter], weight_decay=1.0).step()
    assert_close(parameter.detach(), torch.ones(3), EXACT, "weight")
