"""Mixture-of-experts layers on several ranks, where the split of tokens is uneven."""

from unittest import mock

import pytest
import torch

from megatron.core.parameters.initialization import canonical_names
from megatron.core.transport import collectives
from megatron.core.transport.work import Work
from tests.harness.distributed import distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.transformer.moe.small_layer import layer, tokens


@distributed(world_size=2, tp=2, expt_tp=2)
def test_rows_that_do_not_divide_over_tensor_parallel_ranks_are_right_too(groups):
    options = {"tensor_model_parallel_size": 2, "add_bias_linear": False}
    split, whole = layer(groups, **options), layer(add_bias_linear=False)
    x, y = tokens(s=5, b=1), tokens(s=5, b=1)
    out, expected = split(x)[0], whole(y)[0]
    assert_close(out, expected, FP32_REORDERED_SUM, "output")
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_close(x.grad, y.grad, FP32_REORDERED_SUM, "gradient of the input")


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("grouped", [False, True])
@distributed(world_size=2, ep=2)
def test_a_rank_whose_experts_nobody_visits_takes_part(groups, dispatcher, grouped):
    options = {"moe_grouped_gemm": grouped, "add_bias_linear": False}
    ranks = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": dispatcher}
    split, whole = layer(groups, **options, **ranks), layer(**options)
    x, y = tokens(), tokens()
    for moe, tokens_of_rank in ((split, x), (whole, y)):
        with torch.no_grad():
            moe.router.weight.copy_(torch.tensor([3.0, 2.0, -2.0, -3.0])[:, None])
            tokens_of_rank.abs_()  # so that the first two experts are the best for every token
        moe(tokens_of_rank)[0].square().sum().backward()
    assert_close(x.grad, y.grad, FP32_REORDERED_SUM, "gradient of the input")
    names, expected = canonical_names(split), dict(whole.named_parameters())
    by_name = {canonical_names(whole)[name]: p for name, p in expected.items()}
    for name, parameter in split.experts.named_parameters():
        reference = by_name[names[f"experts.{name}"]]
        # Both ranks brought the same tokens.
        assert_close(parameter.grad, 2 * reference.grad, FP32_REORDERED_SUM, name)
    assert split.experts.first_expert == 2 * groups.ep.rank()


@pytest.mark.parametrize("is_apart", [False, True])
@distributed(world_size=2, ep=2)
def test_a_shared_expert_is_computed_while_tokens_and_gradients_travel(groups, is_apart):
    shared = {
        "moe_branch_norms": is_apart,
        "moe_router_scales": is_apart,
        "add_bias_linear": False,
        "moe_shared_expert_intermediate_size": 16,
    }
    shared |= {"moe_shared_expert_gate": True, "moe_token_dispatcher_type": "alltoall"}
    ranks = {"expert_model_parallel_size": 2, "moe_shared_expert_overlap": True}
    split, whole = layer(groups, **shared, **ranks), layer(**shared)
    under_way, computed = [], []
    start, wait = collectives.start_all_to_all, Work.wait

    def starting(*args):
        under_way.append(start(*args))
        return under_way[-1]

    def waiting(pending):
        if pending in under_way:  # and no other collective
            under_way.remove(pending)
        return wait(pending)

    def note(name):
        computed.append((name, len(under_way)))

    expert = split.shared_experts
    for half in ("fc1", "fc2"):
        linear = getattr(expert, f"linear_{half}")
        linear.register_forward_hook(lambda *_, half=half: note(half))
        linear.weight.register_hook(lambda _, half=half: note(f"{half} back"))
    x, y = tokens(), tokens()
    with (
        mock.patch.object(collectives, "start_all_to_all", starting),
        mock.patch.object(Work, "wait", waiting),
    ):
        out = split(x)[0]
        out.square().sum().backward()
    assert computed == [("fc1", 1), ("fc2", 1), ("fc2 back", 1), ("fc1 back", 1)]
    expected = whole(y)[0]
    expected.square().sum().backward()
    assert_close(out, expected, FP32_REORDERED_SUM, "output")
    assert_close(x.grad, y.grad, FP32_REORDERED_SUM, "gradient of the input")
    for name, parameter in whole.shared_experts.named_parameters():
        found = expert.get_parameter(name).grad
        assert_close(found, parameter.grad, FP32_REORDERED_SUM, name)
