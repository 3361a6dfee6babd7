"""Tokens travel to experts in sizes that are known before the router has chosen."""

import pytest
import torch

from megatron.core.transformer.moe.load_balancing import DROPPED
from megatron.core.transformer.moe.token_dispatcher import ExchangeCapacity
from tests.harness.distributed import distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.transformer.moe.small_layer import E, K, layer, tokens


def trained(moe, x):
    x = x.detach().requires_grad_()
    torch.use_deterministic_algorithms(True)  # fills memory without a value with NaN
    try:
        output = moe(x)[0]
        output.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    return output.detach(), x.grad, [p.grad for p in moe.parameters()]


def of_rank(x, rank):
    return (x * (1 + 0.5 * rank)).roll(rank, 0)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}]
)
@distributed(world_size=4, ep=4)
def test_a_layer_computes_the_same_as_with_sizes_from_the_host(groups, grouped, options):
    options = {"moe_grouped_gemm": grouped, "moe_token_dispatcher_type": "alltoall"} | options
    x = of_rank(tokens(), groups.ep.rank())
    plain = layer(groups, **options | {"moe_pad_expert_input_to_capacity": False})
    static = layer(groups, **options, moe_expert_rank_capacity_factor=4.0)
    padded = layer(groups, **options)
    expected = trained(plain, x)
    for moe in (static, padded):
        output, gradient, of_weights = trained(moe, x)
        assert_close(output, expected[0], FP32_REORDERED_SUM, "output")
        assert_close(gradient, expected[1], FP32_REORDERED_SUM, "gradient of the input")
        for found, wanted in zip(of_weights, expected[2], strict=True):
            assert_close(found, wanted, FP32_REORDERED_SUM, "gradient of a weight")


@distributed(world_size=4, ep=2, tp=2, expt_tp=2)
def test_what_comes_after_the_last_row_reaches_nobody(groups):
    dispatcher = layer(groups, moe_token_dispatcher_type="alltoall").token_dispatcher
    x = of_rank(tokens(), groups.tp_ep.rank()).detach().view(-1, 16).requires_grad_()
    t = x.shape[0]
    probs = torch.rand(t, E, generator=torch.Generator().manual_seed(groups.tp_ep.rank()))
    chosen = torch.zeros(t, E, dtype=torch.bool).scatter_(1, probs.topk(K, 1).indices, True)
    probs = (probs * chosen).requires_grad_()
    sent = dispatcher.dispatch(x, probs, chosen, capacity=ExchangeCapacity(t * K, t * K))
    number = sum(sent.tokens_per_expert)
    assert number < sent.tokens.shape[0] == 4 * t * K
    assert int(sent.num_dropped) == 0

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.index_fill(0, torch.arange(number, len(rows)), torch.nan)

        @staticmethod
        def backward(ctx, grad):
            return grad.index_fill(0, torch.arange(number, len(grad)), torch.nan)

    output = sent.combine(Poison.apply(sent.tokens) * sent.probs[:, None] / 2)
    assert_close(output, x * probs.sum(1, keepdim=True), FP32_REORDERED_SUM, "output")
    output.sum().backward()
    wanted = probs.detach().sum(1, keepdim=True).expand_as(x)
    assert_close(x.grad, wanted, FP32_REORDERED_SUM, "gradient")
    assert probs.grad.isfinite().all()


@distributed(world_size=2, ep=2)
def test_choices_beyond_the_capacity_are_dropped_and_counted(groups):
    moe = layer(groups, moe_token_dispatcher_type="alltoall", moe_expert_rank_capacity_factor=0.5)
    x = of_rank(tokens(), groups.ep.rank())
    routing = moe.router(x)[1]
    rows = -(-x.shape[0] * x.shape[1] * K // 4)
    of_ranks = routing.view(-1, 2, E // 2).sum((0, 2))
    moe(x)
    dropped = moe.router.load._sums[DROPPED]
    assert int(dropped) == int((of_ranks - rows).clamp(min=0).sum()) > 0
