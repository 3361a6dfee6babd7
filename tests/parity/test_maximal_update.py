"""Under muP training equals one process: initial values, factors, learning rates of each kind."""

import pytest

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import assert_equals_one_process

CASES = [
    (LayoutCase(tp=2, dp=2, stage=2, tiled=True), ModelCase("gpt2", True, 0.0, base_width=8)),
    (LayoutCase(pp=2, vp=2), ModelCase("latent", False, 0.0, later_tokens=1, base_width=8)),
    (
        LayoutCase(tp=2, sp=True, ep=2, dp=2),
        ModelCase("llama", False, 0.0, experts="deepseek", base_width=8),
    ),
]


@pytest.mark.parametrize(("layout", "model"), CASES, ids=[f"{m}: {p}" for p, m in CASES])
def test_training_under_mup_equals_one_process(layout, model):
    assert_equals_one_process(layout, model)
