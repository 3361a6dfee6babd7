"""Attention whose output is gated is that of one process, in every layout."""

import pytest

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import assert_equals_one_process

CASES = [
    # More tensor-parallel ranks than key heads; queries and gates are then on several ranks.
    (LayoutCase(tp=4, sp=True), ModelCase("llama", False, 0.1, gated=True)),
    (LayoutCase(tp=2, pp=2, vp=2, recomputes=True), ModelCase("gpt2", True, 0.0, gated=True)),
    (
        LayoutCase(cp=2, dp=2, stage=3),
        ModelCase("llama", False, 0.0, packed=True, gated=True, base_width=8),
    ),
    (
        LayoutCase(tp=2, sp=True, dp=2, ep=2, expt_tp=2, stage=2),
        ModelCase("llama", False, 0.0, experts="dropless", gated=True, largest_logit=0.05),
    ),
]


@pytest.mark.parametrize(("layout", "model"), CASES, ids=[f"{m}: {p}" for p, m in CASES])
def test_gated_attention_equals_one_process(layout, model):
    assert_equals_one_process(layout, model)
