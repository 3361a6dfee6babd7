"""Features do not depend on the layout: a part of `python -m tests.parity.features`."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from megatron.core.transformer.config.precision import OFFLOAD_MODULES, RECOMPUTE_MODULES
from tests.parity.features import (
    COMPOSITE,
    FEATURES,
    JOINED,
    LAYOUTS,
    cells,
    wrong_refusal,
)
from tests.parity.layouts import LayoutCase
from tests.parity.table import assert_equals_one_process, serial_run

SAMPLE = [cell for cell in cells(JOINED, COMPOSITE) if cell.refused is None]


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_feature_trains_like_one_process(cell):
    assert_equals_one_process(cell.layout, cell.model)


@pytest.mark.parametrize("feature", ["qk-clip", "qk-clip of latents", "muP", "gated attention"])
def test_a_feature_makes_training_another(feature):
    model = FEATURES[feature].model
    without = replace(model, largest_logit=None, base_width=None, gated=False)
    serial = LAYOUTS["dp"].serial
    mine, plain = (serial_run(serial, m, 2).weights for m in (model, without))
    queries = "linear_q_up_proj" if model.family == "latent" else "linear_qkv"
    for name in mine:
        if f"{queries}.weight" in name:
            first = mine[name], plain[name]
            assert first[0].shape != first[1].shape or not torch.allclose(*first, rtol=1e-3), name


@pytest.mark.parametrize("feature", FEATURES)
def test_settings_are_refused_where_the_table_says_so_and_nowhere_else(feature):
    of_feature = cells({feature: FEATURES[feature]}, list(LAYOUTS))
    assert [problem for cell in of_feature if (problem := wrong_refusal(cell))] == []


def test_the_table_has_every_axis_alone_and_every_stage():
    alone = [
        dict(tp=2), dict(tp=2, sp=True), dict(pp=2), dict(pp=2, vp=2), dict(cp=2),
        dict(dp=2), dict(dp=2, ep=2), dict(tp=2, sp=True, expt_tp=2),
        *(dict(dp=2, stage=stage) for stage in (1, 2, 3)),
    ]  # fmt: skip
    missing = [axes for axes in alone if LayoutCase(samples=4, **axes) not in LAYOUTS.values()]
    assert missing == []
    assert {layout.world_size for layout in LAYOUTS.values()} == {2, 4, 8}


def test_the_tested_part_has_every_two_axes_together_and_every_stage():
    layouts = [LAYOUTS[name] for name in COMPOSITE]
    together = [
        {axis for axis in ("tp", "pp", "cp", "dp") if getattr(layout, axis) > 1}
        for layout in layouts
    ]
    assert all(
        any({one, other} <= axes for axes in together)
        for one, other in combinations(("tp", "pp", "cp", "dp"), 2)
    )
    assert {layout.stage for layout in layouts} == {1, 2, 3}
    assert max(layout.ep for layout in layouts) == max(layout.expt_tp for layout in layouts) == 2
    assert max(layout.vp for layout in layouts) == 2 and any(layout.sp for layout in layouts)


def test_every_module_that_can_be_recomputed_or_offloaded_is_a_feature():
    recomputed = [feature.recomputed for feature in FEATURES.values() if feature.recomputed]
    assert recomputed == [(module,) for module in RECOMPUTE_MODULES]
    offloaded = [feature.offloaded for feature in FEATURES.values() if feature.offloaded]
    assert offloaded == [(module,) for module in (*OFFLOAD_MODULES, "layers")]
