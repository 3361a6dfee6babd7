"""Muon against the singular value decomposition, and who gets which rule."""

import pytest
import torch
from torch import nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.muon import QUINTIC, assign_owners, orthogonalize, update_scale
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK
from tests.harness.tolerances import FP32_REORDERED_SUM, FP32_ROUNDED_ONCE, assert_close

SINGLE = ProcessGroupCollection.single()


def polynomial(singular_values: torch.Tensor, num_steps: int) -> torch.Tensor:
    a, b, c = QUINTIC
    for _ in range(num_steps):
        s = singular_values
        singular_values = a * s + b * s**3 + c * s**5
    return singular_values


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40), (1, 9), (9, 1)])
@pytest.mark.parametrize("num_steps", [1, 5])
def test_only_singular_values_change_and_by_the_polynomial(shape, num_steps):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    moved = polynomial(s / s.square().sum().sqrt(), num_steps)
    expected = u @ torch.diag(moved) @ v
    assert_close(
        orthogonalize(matrix, num_steps, group=SINGLE_RANK), expected, FP32_REORDERED_SUM, "update"
    )


def test_five_steps_bring_singular_values_near_one():
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(matrix)
    # Of Frobenius norm 2.2, so the smallest begins at 0.009.
    spread = u @ torch.diag(torch.logspace(-1.7, 0, 64)) @ v
    moved = torch.linalg.svdvals(orthogonalize(spread, 5, group=SINGLE_RANK))
    assert float(moved.min()) > 0.5 and float(moved.max()) < 1.25


def test_a_zero_matrix_stays_zero():
    assert not orthogonalize(torch.zeros(4, 6), group=SINGLE_RANK).any()


def test_spectral_scale_gives_updates_of_unit_size():
    matrix = torch.randn(32, 96, generator=torch.Generator().manual_seed(4))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    rms = float((u @ v).square().mean().sqrt()) * update_scale(32, 96, "spectral")
    assert rms == pytest.approx(1.0, rel=1e-4)
    assert update_scale(32, 96, "shape_scaling") == 1.0
    assert update_scale(96, 24, "unit_rms_norm") == pytest.approx(2.0)


class Layers(nn.Module):
    """One of each kind of parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.qkv = nn.Linear(6, 24)
        self.gated = nn.Linear(6, 16, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        set_param_meta(self.head.weight, ParamMeta(is_embedding_or_output=True))
        set_param_meta(self.qkv.weight, ParamMeta(split_dim=0, fused_row_sizes=(6, 3, 3)))
        set_param_meta(self.gated.weight, ParamMeta(split_dim=0, stride=2))


def build(model, overrides=None, **settings):
    settings = {"optimizer": "muon", "lr": 0.1, "weight_decay": 0.5, "clip_grad": 0.0} | settings
    return get_megatron_optimizer(
        OptimizerConfig(**settings), [model], overrides, pg_collection=SINGLE
    )


def rules_by_name(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: group.get("optimizer", "muon")
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_hidden_matrices_go_to_muon_and_the_rest_to_adam():
    model = Layers()
    assert rules_by_name(model, build(model)) == {
        "embedding.weight": "adam",
        "qkv.weight": "muon",
        "qkv.bias": "adam",
        "gated.weight": "muon",
        "head.weight": "adam",
    }
    override = {ParamKey(name="gated.*"): {"optimizer": "lion"}}
    assert rules_by_name(model, build(model, override))["gated.weight"] == "lion"


@pytest.mark.parametrize("rule", ["muon", "lamb"])
def test_a_rule_that_cannot_update_a_parameter_is_refused(rule):
    with pytest.raises(ConfigError, match=r"qkv\.bias"):
        build(Layers(), {ParamKey(name="qkv.bias"): {"optimizer": rule}})


@pytest.mark.parametrize("nesterov", [False, True])
def test_stacked_matrices_are_updated_one_by_one(nesterov):
    model = Layers()
    optimizer = build(model, muon_use_nesterov=nesterov, muon_extra_scale_factor=0.2)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    # Rows of q, k, v alternate by group: 6, 3, 3, 6, 3, 3.
    group = torch.tensor([0] * 6 + [1] * 3 + [2] * 3).repeat(2)
    stacks = {"qkv.weight": group, "gated.weight": torch.arange(16) // 8}
    momentum = {name: torch.zeros_like(weights[name]) for name in stacks}
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        assert optimizer.step()[0]
        for name, owners in stacks.items():
            momentum[name] = 0.9 * momentum[name] + 0.1 * gradients[name]
            seen = momentum[name]
            if nesterov:
                seen = 0.1 * gradients[name] + 0.9 * momentum[name]
            weights[name] = weights[name] * (1 - 0.1 * 0.5)
            for number in owners.unique():
                block = orthogonalize(seen[owners == number], group=SINGLE_RANK)
                scale = 0.2 * max(block.shape) ** 0.5
                weights[name][owners == number] -= 0.1 * scale * block
            ours = model.get_parameter(name).detach()
            assert_close(ours, weights[name], FP32_REORDERED_SUM, name)


def test_lion_may_update_what_is_no_matrix():
    model = Layers()
    optimizer = build(model, muon_scalar_optimizer="lion", weight_decay=0.0)
    before = model.qkv.bias.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert_close(model.qkv.bias.detach(), before - 0.1, FP32_ROUNDED_ONCE, "bias")


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_work_is_dealt_out_evenly(num_ranks):
    costs = [float(1 + (7 * i) % 13) for i in range(40)]
    ranks = assign_owners(costs, num_ranks)
    load = [sum(c for c, r in zip(costs, ranks, strict=True) if r == k) for k in range(num_ranks)]
    assert max(load) <= sum(costs) / num_ranks + max(costs)
