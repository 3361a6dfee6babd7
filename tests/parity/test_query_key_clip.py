"""Heads whose attention logits are large are scaled down as in one process, in every layout."""

import pytest

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import assert_equals_one_process

CASES = [
    # More tensor-parallel ranks than key heads, whose rows are then on several ranks.
    (LayoutCase(tp=4, sp=True), ModelCase("llama", False, 0.1, largest_logit=0.05)),
    (
        LayoutCase(tp=2, pp=2, vp=2, recomputes=True),
        ModelCase("latent", False, 0.0, largest_logit=0.05),
    ),
    (LayoutCase(cp=2, fsdp2=True), ModelCase("gpt2", True, 0.0, largest_logit=0.05)),
    (
        LayoutCase(cp=2, cp_kind="a2a", dp=2, stage=3),
        ModelCase("latent", False, 0.0, packed=True, largest_logit=0.05),
    ),
]


@pytest.mark.parametrize(("layout", "model"), CASES, ids=[f"{m}: {p}" for p, m in CASES])
def test_clipped_heads_are_those_of_one_process(layout, model):
    assert_equals_one_process(layout, model)
