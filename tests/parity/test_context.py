"""A sample of the table of context parallelism: every kind, mask and model part, to 8 ranks.

All of it, with twice as many micro batches, is `python -m tests.parity.context`.
"""

from dataclasses import replace

import pytest

from tests.parity.context import MIXED, MODELS, context_layouts
from tests.parity.layouts import LayoutCase
from tests.parity.table import assert_equals_one_process

TIED, PACKED, WINDOWED, LATENT, LATER = MODELS
BY_COUNTER = replace(PACKED, draws_by_counter=True)
HIERARCHY = {"cp_kind": "a2a+p2p", "levels": (2, 2)}

SAMPLE = [
    (LayoutCase(tp=2, sp=True, pp=2, vp=2, cp=2, cp_kind="p2p"), TIED),
    (LayoutCase(pp=2, cp=4, **HIERARCHY), TIED),
    (LayoutCase(tp=2, cp=2, cp_kind="a2a", tiled=True), PACKED),
    (LayoutCase(cp=4, pp=2, vp=2, cp_kind=MIXED), PACKED),
    (LayoutCase(tp=1, pp=2, vp=2, cp=2, cp_kind="all_gather", tiled=True), WINDOWED),
    (LayoutCase(cp=2, dp=2, cp_kind=MIXED, recomputes=True, stage=3), WINDOWED),
    (LayoutCase(tp=2, sp=True, pp=2, vp=2, cp=2, cp_kind=MIXED), LATENT),
    (LayoutCase(cp=2, stage=1, cp_kind="all_gather", tiled=True), LATER),
    (LayoutCase(tp=2, sp=True, pp=2, cp=2, cp_kind="p2p"), BY_COUNTER),
]


@pytest.mark.parametrize(
    ("layout", "model"), SAMPLE, ids=[f"{model}: {layout}" for layout, model in SAMPLE]
)
def test_a_split_sequence_trains_like_one_process(layout, model):
    # Four micro batches pass through every phase of the schedules, and split sequences as eight do.
    assert_equals_one_process(replace(layout, samples=4), model)


def test_the_table_holds_every_kind_in_every_layout():
    layouts = [layout for layout in context_layouts() if layout.cp > 1]
    assert len({str(layout) for layout in layouts}) == len(layouts)
    assert {layout.world_size for layout in layouts} == {2, 4, 8}
    for size, kinds in ((2, 4), (4, 5)):
        places = {}
        for layout in layouts:
            if layout.cp == size and layout.dp == 1:
                key = (layout.tp, layout.sp, layout.pp, layout.vp, layout.stage)
                places.setdefault(key, set()).add(str(layout.cp_kind))
        assert {len(found) for found in places.values()} == {kinds}
