"""A sample of `python -m tests.parity.objectives_table`: losses after pretraining."""

from dataclasses import replace

import pytest

from tests.parity.compare import compare
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import assert_equals_one_process, exceeds, run_case

EXPERTS = ModelCase("llama", False, 0.0, experts="dropless")
PLAIN = ModelCase("llama", False, 0.0, packed=True, experts="deepseek")
SAMPLE = [
    ("grpo", LayoutCase(tp=2, sp=True, cp=2, ep=2, stage=1, micro_batch_size=2), EXPERTS),
    ("grpo", LayoutCase(pp=2, vp=2, dp=2, stage=3, recomputes=True, micro_batch_size=2), PLAIN),
    ("dpo", LayoutCase(tp=2, cp=2, micro_batch_size=2), PLAIN),
    ("dpo", LayoutCase(pp=2, schedule="zb-h1", dp=2, micro_batch_size=2), PLAIN),
    ("distillation", LayoutCase(tp=2, sp=True, pp=2, micro_batch_size=2), PLAIN),
    ("reward", LayoutCase(tp=2, sp=True, cp=2, micro_batch_size=2), PLAIN),
]


@pytest.mark.parametrize(
    ("objective", "layout", "model"), SAMPLE, ids=[f"{name} {layout}" for name, layout, _ in SAMPLE]
)
def test_a_loss_after_pretraining_equals_one_process(objective, layout, model):
    assert_equals_one_process(layout, replace(model, objective=objective))


def test_the_keys_of_all_replicas_are_told_apart():
    # The balance loss of packed documents is a mean over those of a micro batch, of which replicas
    # have different numbers: it depends on how samples are cut into micro batches.
    model = replace(PLAIN, objective="embedding", packed=False)
    layout = LayoutCase(tp=2, dp=2, stage=1, micro_batch_size=2)
    one = run_case(LayoutCase(micro_batch_size=4), model, 2)
    errors = compare(run_case(layout, model, 2), one)
    assert not exceeds(errors), errors
