"""The arrangement of ranks, as pure arithmetic, up to cluster sizes."""

from itertools import permutations

import pytest

from megatron.core.foundation.errors import TopologyError
from megatron.core.topology.rank_grid import RankGrid, parse_order, plan_layout

AXES = ("tp", "cp", "dp", "pp")


def test_first_axis_of_the_order_varies_fastest():
    layout = plan_layout(16, tp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    assert layout.dense.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert layout.dense.group_of(0, "cp") == [0, 2]
    assert layout.dense.group_of(0, "dp") == [0, 4]
    assert layout.dense.group_of(0, "pp") == [0, 8]


def test_alternative_order_puts_pipeline_before_data():
    layout = plan_layout(8, tp=2, pp=2, order="tp-cp-ep-pp-dp", ep=1)
    assert layout.dense.group_of(0, "pp") == [0, 2]
    assert layout.dense.group_of(0, "dp") == [0, 4]


@pytest.mark.parametrize(("tp", "cp", "pp"), [(1, 1, 1), (2, 1, 4), (4, 2, 2), (2, 3, 1)])
@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("dp", "cp"), ("tp", "pp"), AXES])
def test_groups_of_an_axis_hold_every_rank_once(tp, cp, pp, axes):
    grid = plan_layout(48, tp=tp, cp=cp, pp=pp).dense
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(48))
    assert all(grid.group_of(rank, *axes) == group for group in groups for rank in group)


def test_coordinates_and_rank_are_inverse_in_every_order():
    for order in permutations(["tp", "cp", "dp", "pp"]):
        grid = RankGrid(order, (2, 3, 4, 5), offset=7)
        for rank in range(7, 7 + grid.world_size):
            assert grid.rank_at(grid.coordinates(rank)) == rank


def test_two_axes_meet_in_one_rank():
    grid = plan_layout(64, tp=4, pp=4, cp=2).dense
    for rank in range(64):
        for axis in AXES:
            others = [a for a in AXES if a != axis]
            assert set(grid.group_of(rank, axis)) & set(grid.group_of(rank, *others)) == {rank}


def test_a_rank_of_a_large_cluster_finds_its_groups_without_listing_all():
    grid = plan_layout(16384, tp=8, pp=16, cp=4).dense
    assert grid.group_of(16383, "pp")[-1] == 16383
    assert len(grid.group_of(5000, "dp", "cp")) == 128


def test_expert_grid_covers_the_same_ranks_and_stages():
    layout = plan_layout(32, tp=2, pp=2, cp=2, ep=4, expert_tp=1)
    assert layout.expert.size("dp") == 4
    assert layout.expert.groups("pp") == layout.dense.groups("pp")
    assert layout.expert.group_of(0, "ep") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (dict(world_size=6, tp=4), ["6 ranks", "tp=4", "--tensor-model-parallel-size"]),
        (dict(world_size=8, tp=2, ep=3), ["ep=3", "--expert-model-parallel-size"]),
        (dict(world_size=8, order="tp-xx-pp"), ["'tp-xx-pp'", "tp-cp-ep-dp-pp"]),
    ],
)
def test_impossible_arrangements_are_explained(kwargs, words):
    with pytest.raises(TopologyError) as caught:
        plan_layout(**kwargs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_order_may_leave_axes_out():
    assert parse_order("tp-pp-dp")[:3] == ["tp", "pp", "dp"]
