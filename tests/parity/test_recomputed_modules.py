"""Modules that are computed again in backward give the gradients of one process, in every layout.

The process that they are compared with keeps all activations.
"""

import pytest

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import assert_equals_one_process

OF_EXPERTS = ("moe_act", "shared_experts", "layernorm")
OF_LATENT = ("mla_up_proj", "core_attn")
CASES = [
    (
        LayoutCase(tp=2, sp=True, dp=2, ep=2, expt_tp=2, stage=2, recomputed=OF_EXPERTS),
        ModelCase("llama", False, 0.0, experts="deepseek"),
    ),
    (
        LayoutCase(pp=2, vp=2, dp=2, ep=2, stage=1, recomputed=OF_EXPERTS),
        ModelCase("llama", False, 0.0, experts="deepseek", base_width=8),
    ),
    (
        LayoutCase(tp=2, sp=True, cp=2, recomputed=OF_LATENT),
        ModelCase("latent", False, 0.1, packed=True),
    ),
    (
        LayoutCase(pp=2, dp=2, stage=3, recomputed=OF_LATENT),
        ModelCase("latent", False, 0.0, largest_logit=0.05),
    ),
]


@pytest.mark.parametrize(("layout", "model"), CASES, ids=[f"{m}: {p}" for p, m in CASES])
def test_recomputed_modules_equal_one_process(layout, model):
    assert_equals_one_process(layout, model)
