"""Optimizers without torch's compiler update as torch's own do."""

import pytest
import torch

from megatron.core.optimizer.definition import eager
from tests.harness.tolerances import EXACT, assert_close

KINDS = [
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.2, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9}),
]


def updated(kind, settings):
    draw = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(7, 3, generator=draw)) for _ in range(2)]
    rule = kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.3}], **settings)
    for _ in range(4):
        rule.zero_grad()
        for parameter in parameters:
            parameter.grad = torch.randn(7, 3, generator=draw)
        rule.step()
    return rule, parameters


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_weights_and_state_are_those_of_torch(kind, settings):
    ours, weights = updated(eager(kind), settings)
    theirs, expected = updated(kind, settings)
    assert isinstance(ours, kind)
    for weight, other in zip(weights, expected, strict=True):
        assert_close(weight.detach(), other.detach(), EXACT, "weight")
        assert ours.state[weight].keys() == theirs.state[other].keys()
        for name, tensor in theirs.state[other].items():
            assert_close(ours.state[weight][name], tensor, EXACT, name)
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
