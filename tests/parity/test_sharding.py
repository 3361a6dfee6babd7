"""A sample of the table of sharding stages.

The whole table is `python -m tests.parity.sharding`.
"""

import pytest

from tests.parity.layouts import LayoutCase
from tests.parity.sharding import MODELS, all_cases
from tests.parity.table import assert_equals_one_process

GPT2, LLAMA = MODELS

SAMPLE = [
    (LayoutCase(pp=2, vp=2, dp=2, stage=2), GPT2),
    (LayoutCase(pp=2, vp=2, dp=2, stage=3), GPT2),
    (LayoutCase(tp=2, sp=True, dp=4, stage=3, instances=2, micro_batch_size=2), LLAMA),
    (LayoutCase(tp=2, sp=True, pp=2, dp=2, stage=3, micro_batch_size=4), GPT2),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "model"), SAMPLE, ids=[f"{model}: {layout}" for layout, model in SAMPLE]
)
def test_training_at_this_stage_equals_one_process(layout, model):
    assert layout in all_cases()
    assert_equals_one_process(layout, model)
