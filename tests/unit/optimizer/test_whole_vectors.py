"""With `in_whole_vectors` an element is updated to the same bits wherever its tensor is split."""

import pytest
import torch

from megatron.core.optimizer.definition import ModelTensors, Pieces
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.harness.tolerances import EXACT, assert_close

LENGTH, STEPS = 203, 3
CUTS = [[LENGTH], [1, 2, 200], [16, 187], [7, 32, 1, 15, 17, 131], [100, 103]]
RULES = [
    {"optimizer": "adam"}, {"optimizer": "adam", "decoupled_weight_decay": False},
    {"optimizer": "sgd", "sgd_momentum": 0.9}, {"optimizer": "sgd", "sgd_momentum": 0.0},
    {"optimizer": "lion"},
]  # fmt: skip


def config_of(rule, *, in_whole_vectors=True):
    return OptimizerConfig(lr=0.1, weight_decay=0.2, in_whole_vectors=in_whole_vectors, **rule)


def numbers():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(STEPS + 1, LENGTH, generator=draw).unbind()


def by_pieces(config, cuts):
    """Return the weights and the state after steps over pieces of state."""
    update = OPTIMIZERS[config.optimizer].elementwise(config)
    weights, *gradients = (x.clone() for x in numbers())
    states = {name: torch.zeros(LENGTH) for name in update.state_names}
    settings = {"lr": config.lr, "weight_decay": config.weight_decay, **update.constants}
    for step, gradient in enumerate(gradients):
        parts = {name: state.split(cuts) for name, state in states.items()}
        lists = [list(tensor.split(cuts)) for tensor in (weights, gradient)]
        update.update(Pieces(*lists, parts, settings, step, factor=0.7))
        assert [len(part) for part in lists[0]] == cuts
    return torch.cat([weights, *states.values()])


def by_torch(config, cuts):
    """Return the weights and the state after steps of the optimizer of torch."""
    weights, *gradients = (x.clone() for x in numbers())
    parts = [torch.nn.Parameter(part.clone()) for part in weights.split(cuts)]
    groups = ProcessGroupCollection.single()
    model = ModelTensors([], [], groups, (None, None))
    rule = OPTIMIZERS[config.optimizer].build(config, [{"params": parts}], model)
    for gradient in gradients:
        for part, own in zip(parts, gradient.split(cuts), strict=True):
            part.grad = own
        rule.grad_scale, rule.found_inf = torch.tensor(1 / 0.7), torch.tensor(0.0)
        rule.step()
    assert set(rule.state) <= set(parts), "nothing of the padded elements"
    names = OPTIMIZERS[config.optimizer].states_of(config)
    states = [torch.cat([rule.state[part][name] for part in parts]) for name in names]
    return torch.cat([*(part.detach() for part in parts), *states])


@pytest.mark.parametrize("cuts", CUTS[1:], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_pieces_of_any_length_have_the_bits_of_the_whole(rule, cuts):
    config = config_of(rule)
    whole = by_pieces(config, CUTS[0])
    assert_close(by_pieces(config, cuts), whole, EXACT, "pieces")
    if OPTIMIZERS[config.optimizer].build is not None:
        assert_close(by_torch(config, cuts), whole, EXACT, "torch's optimizer")


@pytest.mark.parametrize("rule", RULES[:3], ids=str)
def test_without_it_the_bits_depend_on_the_split(rule):
    config = config_of(rule, in_whole_vectors=False)
    whole = by_pieces(config, CUTS[0])
    assert any(not torch.equal(by_pieces(config, cuts), whole) for cuts in CUTS[1:])
