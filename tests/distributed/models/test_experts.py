"""Mixture-of-experts layers on several ranks, where the split of tokens is uneven."""

import pytest
import torch

from megatron.core.initialization import canonical_names
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
