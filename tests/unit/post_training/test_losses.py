"""Losses after pretraining are the formulas of their papers, and TRL's numbers."""

import math

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.post_training.heads import replace_head
from megatron.post_training.loss_functions import (
    bradley_terry_loss,
    contrastive_loss,
    dpo_loss,
    group_advantages,
    grpo_loss,
    k3_divergence,
)
from tests.harness.tolerances import FP32_ROUNDED_ONCE, assert_close

POLICY = [[-1.5, -0.25, -2.0], [-0.75, -3.5, -0.5], [-1.0, -1.0, -4.25], [-2.5, -0.125, -1.75]]
REFERENCE = [[-1.0, -0.5, -2.5], [-1.25, -3.0, -1.5], [-1.75, -0.5, -3.0], [-2.0, -0.625, -1.0]]
"""Log-probabilities of the tokens of two chosen and two rejected answers."""
OF_TRL = {
    ("sigmoid", 0.1): 0.6210347414016724,
    ("sigmoid", 0.5): 0.388572633266449,
    ("hinge", 0.5): 0.25,
    ("ipo", 0.5): 0.2569444179534912,
}
"""(kind, beta) -> what `DPOTrainer` of TRL 1.16.0 computes of them."""


@pytest.mark.parametrize(("kind", "beta"), OF_TRL)
def test_the_preference_loss_is_that_of_trl(kind, beta):
    policy, reference = (torch.tensor(x) for x in (POLICY, REFERENCE))
    policy, reference = (
        (x.mean(1) if kind == "ipo" else x.sum(1)).chunk(2) for x in (policy, reference)
    )
    found = dpo_loss(*policy, *reference, beta=beta, kind=kind)
    assert float(found.losses.mean()) == pytest.approx(OF_TRL[kind, beta], abs=1e-6)


def test_equal_models_have_the_loss_of_a_coin_and_labels_may_be_wrong():
    zero, one = torch.zeros(2), torch.ones(2)
    assert_close(
        dpo_loss(zero, one, zero, one).losses, torch.full((2,), math.log(2)), FP32_ROUNDED_ONCE, ""
    )
    smoothed = dpo_loss(one, zero, zero, zero, beta=2.0, label_smoothing=0.25).losses
    expected = 0.75 * math.log1p(math.exp(-2)) + 0.25 * math.log1p(math.exp(2))
    assert smoothed.tolist() == pytest.approx([expected] * 2)
    with pytest.raises(ConfigError, match="sigmoid, hinge, ipo"):
        dpo_loss(one, zero, zero, zero, kind="kto")


def test_a_reward_model_pays_for_what_is_less_than_the_margin():
    found = bradley_terry_loss(torch.tensor([2.0]), torch.tensor([1.0]), 0.5)
    assert found.item() == pytest.approx(math.log1p(math.exp(-0.5)))


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]])
    assert group_advantages(rewards)[0].tolist() == pytest.approx([-1, 0, 1], abs=2e-6)
    assert group_advantages(rewards)[1].abs().max() == 0
    assert group_advantages(rewards, scales=False)[0].tolist() == [-1.0, 0.0, 1.0]


def test_the_ratio_is_clipped_on_the_side_where_it_would_gain():
    ratio = torch.tensor([[0.5, 0.9, 1.1, 1.5]])
    for advantage, used, clipped in (
        (2.0, [0.5, 0.9, 1.1, 1.3], [False, False, False, True]),
        (-2.0, [0.8, 0.9, 1.1, 1.5], [True, False, False, False]),
    ):
        found = grpo_loss(
            ratio.log(), torch.zeros(1, 4), torch.tensor([[advantage]]), clip_ratio_high=0.3
        )
        assert_close(found.losses[0], -advantage * torch.tensor(used), FP32_ROUNDED_ONCE, "loss")
        assert found.is_clipped[0].tolist() == clipped


def test_the_divergence_is_zero_for_equal_models_and_its_mean_is_that_of_the_distributions():
    policy, reference = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    assert k3_divergence(policy, policy).abs().max() == 0
    expected = (policy.exp() * (policy - reference)).sum()
    assert float((policy.exp() * k3_divergence(policy, reference)).sum()) == pytest.approx(
        float(expected)
    )
    with_it = grpo_loss(policy, policy, torch.zeros(50), reference, kl_coef=0.5).losses
    assert torch.equal(with_it, 0.5 * k3_divergence(policy, reference))
    with pytest.raises(ConfigError, match="without log-probabilities of the reference"):
        grpo_loss(policy, policy, torch.zeros(50), kl_coef=0.5)


def test_a_query_is_told_its_key_from_others():
    keys = torch.eye(4) * 3
    found = contrastive_loss(keys[2:] * 7, keys, temperature=0.5, first=2)
    assert found.tolist() == pytest.approx([math.log1p(3 * math.exp(-2))] * 2)


def test_a_tied_head_is_not_replaced():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    model = GPTModel(
        config, get_gpt_layer_local_spec(), 16, 8, share_embeddings_and_output_weights=True,
        pg_collection=ProcessGroupCollection.single(),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="untie-embeddings-and-output-weights"):
        replace_head(model)
