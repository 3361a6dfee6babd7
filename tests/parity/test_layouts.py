"""A sample of the parity table in which every value of every axis meets every other at least once.

The whole table is `python -m tests.parity.table`.
"""

import pytest

from tests.parity.layouts import LayoutCase, ModelCase, all_layouts, all_models
from tests.parity.table import assert_equals_one_process

SAMPLE = [
    (LayoutCase(tp=2, sp=True, pp=2, vp=3, dp=2), ModelCase("llama", True, 0.1)),
    (LayoutCase(tp=4, sp=True, pp=2, vp=1, dp=1), ModelCase("llama", True, 0.1)),
    (LayoutCase(tp=1, pp=4, vp=3, dp=2), ModelCase("llama", True, 0.1)),
    (LayoutCase(tp=2, pp=4, vp=2, dp=1), ModelCase("gpt2", False, 0.1)),
    (LayoutCase(tp=4, sp=False, pp=1, dp=2), ModelCase("gpt2", False, 0.1)),
    (LayoutCase(tp=2, sp=True, pp=2, vp=1, dp=2), ModelCase("gpt2", False, 0.1)),
    (LayoutCase(tp=4, sp=True, pp=2, vp=2, dp=1), ModelCase("gpt2", True, 0.0)),
    (LayoutCase(tp=1, pp=2, vp=1, dp=2), ModelCase("gpt2", True, 0.0)),
    (LayoutCase(tp=2, sp=False, pp=2, vp=3, dp=1), ModelCase("gpt2", True, 0.0)),
    (LayoutCase(tp=2, sp=False, pp=1, dp=2), ModelCase("llama", False, 0.0)),
    (LayoutCase(tp=1, pp=4, vp=1, dp=1), ModelCase("llama", False, 0.0)),
    (LayoutCase(tp=4, sp=True, pp=2, vp=3, dp=1), ModelCase("llama", False, 0.0)),
    (LayoutCase(tp=2, sp=True, pp=2, vp=2, dp=2, stage=1), ModelCase("llama", True, 0.1)),
    (LayoutCase(tp=1, pp=1, dp=2, stage=1), ModelCase("gpt2", False, 0.1)),
    (LayoutCase(tp=2, sp=True, pp=2, schedule="zb-h1", dp=2), ModelCase("gpt2", True, 0.1)),
    (LayoutCase(pp=4, vp=2, schedule="zb-v", dp=2, stage=2), ModelCase("llama", True, 0.0)),
    (LayoutCase(tp=2, pp=4, vp=2, schedule="dualpipe-v"), ModelCase("gpt2", False, 0.1)),
]


@pytest.mark.parametrize(
    ("layout", "model"), SAMPLE, ids=[f"{model}: {layout}" for layout, model in SAMPLE]
)
def test_training_in_this_layout_equals_one_process(layout, model):
    assert_equals_one_process(layout, model)


def test_the_table_covers_every_product_of_up_to_eight_ranks():
    layouts, models = all_layouts(), all_models()
    assert len(set(layouts)) == len(layouts) == 46
    assert len(set(models)) == 8
    assert max(layout.world_size for layout in layouts) == 8
    assert {layout.vp for layout in layouts} == {1, 2, 3}
