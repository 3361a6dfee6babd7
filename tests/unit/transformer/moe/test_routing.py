"""Which experts a token is routed to."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.moe.routing import (
    apply_capacity,
    sinkhorn,
    sinkhorn_routing,
    topk_routing,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_ROUNDED_ONCE, assert_close


def config(**options):
    return TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        **{"num_moe_experts": 8, "moe_router_topk": 3} | options,
    )


def logits(tokens=50, seed=1):
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


SCORES = [
    {},
    {"moe_router_pre_softmax": True},
    {"moe_router_score_function": "sigmoid"},
    {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 2.0},
    {"moe_router_num_groups": 4, "moe_router_group_topk": 3},
]


@pytest.mark.parametrize("options", SCORES)
def test_each_token_visits_k_experts_with_positive_weights(options):
    chosen = topk_routing(logits(), config(**options))
    assert chosen.routing_map.sum(-1).eq(3).all()
    assert (chosen.probs > 0).equal(chosen.routing_map)
    assert_close(chosen.scores.sum(-1), torch.ones(50), FP32_ROUNDED_ONCE, "moe")


@pytest.mark.parametrize("options", SCORES)
def test_weights_of_normalised_routers_add_up_to_the_scaling_factor(options):
    if options.get("moe_router_pre_softmax"):
        options = options | {"moe_router_topk": 8}
    total = topk_routing(logits(), config(**options)).probs.sum(-1)
    expected = options.get("moe_router_topk_scaling_factor", 1.0)
    assert_close(total, torch.full_like(total, expected), FP32_ROUNDED_ONCE, "moe")


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_with_softmax_scores_a_bias_changes_the_choice_and_not_the_weights(pre_softmax):
    bias, given = torch.linspace(-0.3, 0.3, 8), logits()
    options = config(moe_router_pre_softmax=pre_softmax, moe_router_enable_expert_bias=True)
    found = topk_routing(given, options, bias)
    scores = given.softmax(-1)
    best = (scores + bias).topk(3, -1).indices
    assert found.routing_map.equal(torch.zeros(50, 8, dtype=torch.bool).scatter_(1, best, True))
    weights = scores.gather(1, best)
    if not pre_softmax:
        weights = weights / weights.sum(-1, keepdim=True)
    assert_close(found.probs.gather(1, best), weights, FP32_ROUNDED_ONCE, "moe")


def test_a_token_visits_no_more_groups_than_allowed():
    limited = config(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk=4)
    assignments = topk_routing(logits(), limited).routing_map
    groups = assignments.unflatten(-1, (4, 2)).any(-1)
    assert groups.sum(-1).eq(2).all()


def test_groups_are_judged_by_as_many_of_their_experts_as_asked():
    x = torch.tensor([[9.0, 0, 0, 0, 6, 6, 5, 5]])  # the best expert, and the best pair
    groups = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2}
    visited = [
        topk_routing(x, config(**groups, moe_router_group_score_topk=n)).routing_map[0, 0]
        for n in (1, 2)
    ]
    assert visited == [True, False]


def test_an_expert_bias_changes_the_choice_and_not_the_scores():
    settings = config(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    x = logits()
    bias = torch.zeros(8)
    bias[5] = 10.0
    chosen = topk_routing(x, settings, bias)
    assert chosen.routing_map[:, 5].all()
    assert chosen.scores.equal(topk_routing(x, settings).scores)


def test_a_balanced_assignment_gives_tokens_and_experts_equal_shares():
    balanced = sinkhorn(logits(400), lambda x: x)
    assert balanced.sum(0).sub(1 / 8).abs().max() < 1e-3 / 8
    settings = config(moe_router_topk=1, moe_router_load_balancing_type="sinkhorn")
    loads = sinkhorn_routing(logits(400), settings, lambda _: balanced)
    plain = topk_routing(logits(400), config(moe_router_topk=1, moe_router_pre_softmax=True))
    assert loads.routing_map.sum(0).float().std() < plain.routing_map.sum(0).float().std()


def test_a_full_expert_keeps_the_likeliest_or_the_first():
    priorities = torch.tensor([0.1, 0.5, 0.5, 0.9, 0.2]).view(5, 1, 1)
    chosen = torch.ones(5, 1, 1, dtype=torch.bool)
    chosen[4] = False
    kept = apply_capacity(priorities, chosen, 2, "probs")
    assert kept.flatten().tolist() == [False, True, False, True, False]
    kept = apply_capacity(priorities, chosen, 2, "position")
    assert kept.flatten().tolist() == [True, True, False, False, False]


def test_of_equal_tokens_the_first_is_kept_however_their_weights_were_rounded():
    chosen = torch.ones(3, 1, 1, dtype=torch.bool)
    for noise in (-1e-7, 0.0, 1e-7):
        priorities = torch.tensor([0.3, 0.3 + noise, 0.3 - noise]).view(3, 1, 1)
        kept = apply_capacity(priorities, chosen, 1, "probs")
        assert kept.flatten().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"moe_router_topk": 9}, "moe_router_topk=9 of 8 experts"),
        ({"num_moe_experts": 0}, "num_moe_experts=0"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor=0.0"),
        ({"moe_pad_expert_input_to_capacity": True}, "without a capacity"),
        ({"expert_model_parallel_size": 3}, "8 experts cannot be split"),
        ({"expert_tensor_parallel_size": 5}, "moe_ffn_hidden_size=32 cannot be split"),
        ({"num_moe_experts": None, "expert_model_parallel_size": 2}, "without experts"),
        ({"moe_router_topk": 1}, "would not learn"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "8 experts in 3 groups"),
        ({"moe_router_num_groups": 4}, "moe_router_group_topk=None"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 1}, "from 1 groups of 2 experts"),
        ({"moe_layer_freq": [1, 0, 1]}, "for 2 layers"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0"),
        ({"moe_router_load_balancing_type": "fair"}, "'fair'"),
        ({"moe_aux_loss_coeff": [0.1, 0.2]}, "for 1 methods"),
        ({"moe_router_score_function": "relu"}, "'relu' is unknown"),
        ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate=True"),
        ({"moe_branch_norms": True}, "moe_branch_norms=True"),
        (
            {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"},
            "moe_shared_expert_overlap with moe_shared_expert_intermediate_size=None",
        ),
        (
            {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 8},
            "moe_token_dispatcher_type='allgather'",
        ),
        (
            {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2},
            "moe_token_dispatcher_type='allgather'",
        ),
        (
            {
                "overlap_moe_expert_parallel_comm": True,
                "pipeline_model_parallel_size": 2,
                "pipeline_schedule": "zb-h1",
            },
            "in the zb-h1 schedule",
        ),
        (
            {"overlap_moe_expert_parallel_comm": True, "moe_layer_recompute": True},
            "with recomputed expert layers",
        ),
        ({"mlp_chunks_for_training": 2}, "mlp_chunks_for_training=2 in a model with experts"),
    ],
)
def test_impossible_settings_are_refused_with_a_fix(options, found):
    with pytest.raises(ConfigError) as caught:
        config(**options)
    problems = caught.value.problems or (caught.value,)
    assert any(found in problem.found + problem.rule for problem in problems), caught.value
    assert all(problem.flags and problem.fix for problem in problems)
