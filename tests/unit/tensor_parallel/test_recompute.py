"""Recomputed activations give bit-equal gradients, whatever draws random numbers inside."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.initialization import init_method_normal
from megatron.core.parameters.keyed_draws import keyed_dropout
from megatron.core.parameters.rng import rng_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    checkpoint,
    get_all_rng_states,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)


class Block(nn.Module):
    """A residual block with all three kinds of dropout."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 1.0) -> Tensor:
        self.calls += 1
        with rng_state().in_scope("block", self.number):
            y = keyed_dropout(torch.tanh(self.first(x)), 0.4)
            with get_cuda_rng_tracker().fork():
                y = F.dropout(y, 0.3)
            y = F.dropout(self.second(y), 0.2)
            y = keyed_dropout(y, 0.1)
        return x + y * factor + (0.0 if shift is None else shift)


def run(wrap) -> tuple[Tensor, list[Tensor], list[Block]]:
    """Train one step of three blocks; `wrap(blocks, x)` computes the output."""
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(7)
    rng_state().set_microbatch(2)
    blocks = [Block(i) for i in range(3)]
    x = torch.randn(8, 2, 6, requires_grad=True)
    out = wrap(blocks, x)
    (out**2).sum().backward()
    grads = [x.grad, *(p.grad for block in blocks for p in block.parameters())]
    draws = [torch.rand(1), torch.tensor(float(rng_state().scope.draw_index))]
    with get_cuda_rng_tracker().fork():
        draws.append(torch.rand(1))
    return out.detach(), grads + draws, blocks


def plain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def each(blocks, x):
    for block in blocks:
        x = checkpoint(block, False, x)
    return x


def together(blocks, x):
    return checkpoint(lambda x: plain(blocks, x), False, x)


def nested(blocks, x):
    return checkpoint(lambda x: each(blocks, x), False, x)


def without_output(blocks, x):
    part = CheckpointWithoutOutput()
    y = part.checkpoint(blocks[0], x)
    z = blocks[1].first(y)
    part.discard_output_and_register_recompute(z)
    assert y.untyped_storage().nbytes() == 0
    return blocks[2](z)


def with_output(blocks, x):
    return blocks[2](blocks[1].first(blocks[0](x)))


def without_output_inside_checkpoint(blocks, x):
    def part(x):
        inner = CheckpointWithoutOutput()
        y = inner.checkpoint(blocks[0], x)
        z = blocks[1].first(y)
        inner.discard_output_and_register_recompute(z)
        return blocks[2](z)

    return checkpoint(part, False, x)


def distributed_on_one_rank(blocks, x):
    for block in blocks:
        x = checkpoint(block, True, x)
    return x


@pytest.mark.parametrize(("wrap", "reference"), [
    (each, plain), (together, plain), (nested, plain), (distributed_on_one_rank, plain),
    (without_output, with_output), (without_output_inside_checkpoint, with_output),
])  # fmt: skip
def test_recomputation_changes_no_bit(wrap, reference):
    out, values, blocks = run(wrap)
    expected_out, expected, _ = run(reference)
    assert torch.equal(out, expected_out)
    for value, wanted in zip(values, expected, strict=True):
        assert (value is None and wanted is None) or torch.equal(value, wanted)
    assert blocks[0].calls > 1


def test_arguments_may_be_none_tuples_and_keywords():
    model_parallel_cuda_manual_seed(7)
    block = Block(0)

    def pair(x, nothing, both, *, factor):
        assert nothing is None
        return block(x, both[1], factor), both[0] * 2

    x, shift = torch.randn(4, 1, 6, requires_grad=True), torch.randn(4, 1, 6)
    function = functools.partial(pair, factor=0.5)
    scale = torch.randn(4, requires_grad=True)
    results = []
    for call in (function, functools.partial(checkpoint, function, False)):
        torch.manual_seed(0)
        initialize_rng_tracker(force_reset=True)
        get_cuda_rng_tracker().add("model-parallel-rng", 11)
        y, z = call(x, None, (scale, shift))
        results.append(torch.autograd.grad(y.sum() + z.sum(), (x, scale)))
    for plain_grad, grad in zip(*results, strict=True):
        assert torch.equal(plain_grad, grad)


def test_without_gradients_nothing_is_recomputed_or_freed():
    model_parallel_cuda_manual_seed(7)
    block, x = Block(0), torch.randn(4, 1, 6)
    with torch.no_grad():
        checkpoint(block, False, x)
        part = CheckpointWithoutOutput()
        y = part.checkpoint(block, x)
        part.discard_output_and_register_recompute(y * 2)
    assert y.untyped_storage().nbytes() > 0 and block.calls == 2


def test_recomputation_writes_main_gradients_once():
    layer = ColumnParallelLinear(
        6, 6, config=ModelParallelConfig(), init_method=init_method_normal(0.5)
    )
    x = torch.randn(5, 1, 6, requires_grad=True)
    function = lambda x: torch.tanh(layer(torch.tanh(layer(x)[0]))[0])  # noqa: E731
    expected = torch.autograd.grad(function(x).sum(), list(layer.parameters()))
    for parameter in layer.parameters():
        parameter.main_grad, parameter.main_grad_is_fresh = torch.empty_like(parameter), True
    checkpoint(function, False, x).sum().backward()
    for parameter, wanted in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, wanted)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_comes_after_a_frozen_layer_has_its_gradients(is_frozen):
    """The first layer of a model whose embedding is frozen, and with adapters its norm, too."""
    norm, linear = nn.LayerNorm(4), nn.Linear(4, 4)
    norm.requires_grad_(not is_frozen)
    x = torch.arange(8.0).view(2, 4).sin()
    part = CheckpointWithoutOutput()
    y = linear(part.checkpoint(norm, x))
    part.discard_output_and_register_recompute(y)
    y.square().sum().backward()
    found = [p.grad for p in (*norm.parameters(), *linear.parameters())]
    norm.zero_grad()
    linear.zero_grad()
    linear(norm(x)).square().sum().backward()
    for ours, plain in zip(found, (*norm.parameters(), *linear.parameters()), strict=True):
        assert plain.grad is None if ours is None else torch.equal(ours, plain.grad)


def test_a_discarded_tuple_comes_back():
    def function(x):
        return torch.exp(x), torch.tanh(x)

    def run_once(discards):
        x = torch.linspace(-1, 1, 6).requires_grad_()
        part = CheckpointWithoutOutput()
        a, b = part.checkpoint(function, x)
        c = a * b
        if discards:
            part.discard_output_and_register_recompute(c)
        return torch.autograd.grad(c.sum(), x)[0]

    assert torch.equal(run_once(True), run_once(False))


# The tracker --------------------------------------------------------------------------------


def test_a_fork_leaves_the_default_generator_alone_and_goes_on_by_itself():
    model_parallel_cuda_manual_seed(5)
    expected = torch.rand(2)
    model_parallel_cuda_manual_seed(5)
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(1)
    one = torch.rand(1)
    with tracker.fork():
        second = torch.rand(1)
    assert torch.equal(torch.cat([one, torch.rand(1)]), expected)
    assert first != second


@pytest.mark.parametrize(("name", "places", "are_equal"), [
    ("model-parallel-rng", ({"tp_rank": 0}, {"tp_rank": 1}), False),
    ("expert-parallel-rng", ({"ep_rank": 0}, {"ep_rank": 1}), False),
    ("expert-parallel-rng", ({"etp_rank": 0}, {"etp_rank": 1}), False),
    ("data-parallel-rng", ({"tp_rank": 0}, {"tp_rank": 1}), True),
])  # fmt: skip
def test_streams_differ_where_their_name_says(name, places, are_equal):
    draws = []
    for place in places:
        model_parallel_cuda_manual_seed(5, **place)
        with get_cuda_rng_tracker().fork(name):
            draws.append(torch.rand(4))
    assert torch.equal(*draws) == are_equal
    assert rng_state().seed == 5
    assert get_data_parallel_rng_tracker_name() in get_all_rng_states()
    assert get_expert_parallel_rng_tracker_name() in get_all_rng_states()


def test_states_can_be_saved_and_put_back():
    model_parallel_cuda_manual_seed(5)
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    with tracker.fork():
        first = torch.rand(3)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)


def test_streams_with_one_seed_or_unknown_names_are_refused():
    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    assert not tracker.is_initialized()
    tracker.add("a", 1)
    with pytest.raises(ConfigError):
        tracker.add("b", 1)
    with pytest.raises(ConfigError):
        tracker.add("a", 2)
    with pytest.raises(ConfigError), tracker.fork("c"):
        pass
