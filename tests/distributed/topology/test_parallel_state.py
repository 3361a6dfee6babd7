"""The facade with Megatron's names, and process groups that really communicate."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state as ps
from megatron.core.foundation.errors import DataError, TopologyError
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import SingleProcess, raise_on_all_ranks
from tests.harness.distributed import distributed


def sum_over(group):
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return total.item()


@distributed(world_size=8, tp=2, pp=4)
def test_stages_know_their_neighbours_and_the_embedding_group(groups):
    rank, stage = dist.get_rank(), dist.get_rank() // 2
    assert ps.get_pipeline_model_parallel_rank() == stage
    assert ps.get_pipeline_model_parallel_next_rank() == (rank + 2) % 8
    assert ps.get_pipeline_model_parallel_prev_rank() == (rank - 2) % 8
    assert ps.is_pipeline_first_stage() == (stage == 0)
    assert ps.is_pipeline_last_stage() == (stage == 3)
    assert ps.is_rank_in_embedding_group() == (stage in (0, 3))
    assert groups.embd.size() == (2 if stage in (0, 3) else 1)
    assert ps.get_tensor_model_parallel_src_rank() == rank - rank % 2
    if groups.embd.size() > 1:
        assert sum_over(groups.embd) == 2 * (rank % 2) + 6


@distributed(world_size=8, tp=2, ep=4, expt_tp=1)
def test_experts_have_their_own_grid(groups):
    assert ps.get_expert_model_parallel_world_size() == 4
    assert ps.get_expert_tensor_parallel_world_size() == 1
    assert ps.get_expert_data_parallel_world_size() == 2
    assert ps.get_data_parallel_world_size() == 4
    assert sum_over(groups.ep) == (6 if dist.get_rank() < 4 else 22)


@distributed(world_size=2)
def test_groups_are_created_once(groups):
    with pytest.raises(TopologyError, match="exist already"):
        ps.initialize_model_parallel(1)


@distributed(world_size=4)
def test_a_problem_on_one_rank_is_raised_on_all(groups):
    rank = dist.get_rank()
    problems = {2: DataError("line 7 is broken.", fix="repair it"), 3: TopologyError("no peer.")}
    with pytest.raises(DataError) as caught:
        raise_on_all_ranks(problems.get(rank), torch_collectives.world())
    assert str(caught.value) == "rank 2: line 7 is broken.\n  fix:   repair it"
    assert caught.value.__cause__ is problems.get(rank)
    raise_on_all_ranks(None, torch_collectives.world())


@distributed(world_size=4, tp=2)
def test_a_group_agrees_by_itself_and_names_the_global_rank(groups):
    rank = dist.get_rank()
    if rank < 2:
        raise_on_all_ranks(None, groups.tp)
    else:
        with pytest.raises(DataError, match="^rank 3: gone"):
            raise_on_all_ranks(DataError("gone.") if rank == 3 else None, groups.tp)
    with pytest.raises(DataError, match="^alone"):
        raise_on_all_ranks(DataError("alone."), SingleProcess())


@distributed(world_size=8)
def test_a_grid_of_ones_own_creates_groups_on_demand(groups):
    grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])
    assert sum_over(grid.create_pg(["tp", "dp"])) == (
        sum(grid.get_rank_enum(["tp", "dp"])[dist.get_rank() // 2 % 2])
    )
    assert grid.get_pg(["dp", "tp"]) is grid.get_pg(["tp", "dp"])
    with pytest.raises(TopologyError, match="create_pg"):
        grid.get_pg("cp")
    with pytest.raises(TopologyError, match="created before"):
        grid.create_pg(["tp", "dp"])
    grid.destroy()


def assert_every_group_communicates(groups):
    for name, ranks in groups.ranks.items():
        assert sum_over(getattr(groups, name)) == sum(ranks), name


LAYOUTS = [
    dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=4),
    dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2),
    dict(pipeline_model_parallel_size=4, num_distributed_optimizer_instances=2),
    dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, order="tp-cp-ep-pp-dp"),
    dict(expert_model_parallel_size=4, tensor_model_parallel_size=2),
    dict(context_parallel_size=8, hierarchical_context_parallel_sizes=[2, 4]),
]


@distributed(world_size=8, pp=4)
def test_groups_are_made_again_in_any_layout_in_one_world(groups):
    for sizes in LAYOUTS + LAYOUTS[::-1]:
        ps.destroy_model_parallel()
        assert_every_group_communicates(ps.initialize_model_parallel(**sizes))


@distributed(world_size=4, pp=4)
def test_a_pool_goes_on_after_groups_were_made_again(groups):
    # Runs after the test above in the same processes.
    ps.destroy_model_parallel()
    assert_every_group_communicates(ps.initialize_model_parallel(2))


@distributed(world_size=4, pp=4)
def test_stages_that_count_their_groups_differently_still_make_one_together(groups):
    assert (groups.embd is SINGLE_RANK) == (dist.get_rank() in (1, 2))
    rank = dist.get_rank()
    for name in (None, "gloo"):
        grid = HyperCommGrid([2, 2], ["inner", "outer"], backend=name)
        assert sum_over(grid.create_pg("inner")) == [1, 1, 5, 5][rank]
        assert sum_over(grid.create_pg("outer")) == [2, 4, 2, 4][rank]
        grid.destroy()
    mixed = dist.new_group([1, 3])
    if rank in (1, 3):
        assert sum_over(mixed) == 4


@distributed(world_size=4)
def test_two_layouts_share_a_world(groups):
    rank = dist.get_rank()
    for _ in range(2):
        ps.destroy_model_parallel()
        sizes = dict(tensor_model_parallel_size=2) if rank < 2 else {}
        first = rank // 2 * 2
        mine = ps.initialize_model_parallel(**sizes, rank_offset=first, local_world_size=2)
        assert mine.ranks["tp_dp"] == [first, first + 1]
        assert_every_group_communicates(mine)


@distributed(world_size=4)
def test_optimizer_instances_that_do_not_divide_the_replicas_are_refused(groups):
    ps.destroy_model_parallel()
    with pytest.raises(TopologyError, match="cannot be cut into 3 instances"):
        ps.initialize_model_parallel(num_distributed_optimizer_instances=3)
    ps.initialize_model_parallel()
