"""A sample of the parity table of mixture-of-experts models (`python -m tests.parity.experts`)."""

import pytest

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import assert_equals_one_process

SAMPLE = [
    (
        LayoutCase(
            tp=2, sp=True, dp=2, ep=2, expt_tp=2, capacity=2.0, grouped=False, micro_batch_size=2
        ),
        ModelCase("llama", True, 0.0, experts="dropless", padded=True),
    ),
    (
        LayoutCase(cp=2, pp=2, ep=2, stage=1, dispatcher="allgather"),
        ModelCase("llama", True, 0.0, experts="dropless", padded=True),
    ),
    (
        LayoutCase(tp=2, cp=2, dp=2, ep=4, expt_tp=2, recomputes=True),
        ModelCase("gpt2", True, 0.1, experts="capacity", replayed=True),
    ),
    (
        LayoutCase(tp=2, sp=True, pp=2, vp=2, schedule="zb-v", dp=2, ep=4, stage=1, capacity=4.0),
        ModelCase("llama", False, 0.0, experts="deepseek"),
    ),
    (
        LayoutCase(tp=2, dp=2, ep=2, dispatcher="allgather"),
        ModelCase("gpt2", False, 0.0, experts="sinkhorn"),
    ),
    (
        LayoutCase(pp=2, dp=2, ep=2, combined=True, stage=1),
        ModelCase("llama", False, 0.1, experts="deepseek", later_tokens=1),
    ),
    (
        LayoutCase(
            pp=2, vp=2, dp=2, ep=2, letters="Et|t||ttmL", combined=True, stage=1, capacity=2
        ),
        ModelCase("llama", True, 0.1, experts="deepseek", later_tokens=1),
    ),
    (
        LayoutCase(tp=2, sp=True, pp=2, dp=2, ep=2, letters="Etttt|mmL"),
        ModelCase("llama", False, 0.1, experts="dropless", letters="M*E-/*E/*E"),
    ),
    (
        LayoutCase(dp=2, ep=2, cp=2, stage=3),
        ModelCase("llama", True, 0.0, experts="dropless", letters="*-E-/M-E/*"),
    ),
    (
        LayoutCase(pp=2, vp=2, dp=2, ep=2, samples=14, group=3, combined=True, stage=3),
        ModelCase("gpt2", True, 0.1, experts="capacity"),
    ),
    (
        LayoutCase(dp=4, ep=2, combined=True, stage=3),
        ModelCase("llama", True, 0.0, experts="dropless", padded=True),
    ),
    (
        LayoutCase(pp=2, vp=2, schedule="dualpipe-v", dp=2, ep=2, combined=True, stage=3),
        ModelCase("llama", True, 0.0, experts="dropless", padded=True, replayed=True),
    ),
]


@pytest.mark.parametrize(
    ("layout", "model"), SAMPLE, ids=[f"{model}: {layout}" for layout, model in SAMPLE]
)
def test_training_experts_in_this_layout_equals_one_process(layout, model):
    assert_equals_one_process(layout, model)
