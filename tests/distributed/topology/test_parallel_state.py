"""The facade with Megatron's names, and process groups that really communicate."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state as ps
from megatron.core.agreement import agree
from megatron.core.errors import DataError, TopologyError
from megatron.core.hyper_comm_grid import HyperCommGrid
from tests.harness.distributed import distributed


def sum_over(group):
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return total.item()


@distributed(world_size=8, tp=2, pp=2, cp=2)
def test_each_group_reduces_over_exactly_its_ranks(groups):
    for name in ("tp", "pp", "cp", "mp", "tp_cp", "dp_cp", "tp_dp_cp", "ep", "expt_dp"):
        assert sum_over(getattr(groups, name)) == sum(groups.ranks[name]), name


@distributed(world_size=8, tp=2, pp=4)
def test_stages_know_their_neighbours_and_the_embedding_group(groups):
    rank, stage = dist.get_rank(), dist.get_rank() // 2
    assert ps.get_pipeline_model_parallel_rank() == stage
    assert ps.get_pipeline_model_parallel_next_rank() == (rank + 2) % 8
    assert ps.get_pipeline_model_parallel_prev_rank() == (rank - 2) % 8
    assert ps.is_pipeline_first_stage() == (stage == 0)
    assert ps.is_pipeline_last_stage() == (stage == 3)
    assert ps.is_rank_in_embedding_group() == (stage in (0, 3))
    assert (groups.embd is not None) == (stage in (0, 3))
    assert ps.get_tensor_model_parallel_src_rank() == rank - rank % 2
    if groups.embd is not None:
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
    problem = DataError("line 7 is broken.", fix="repair it") if dist.get_rank() == 2 else None
    with pytest.raises(DataError, match="line 7 is broken") as caught:
        agree(problem)
    assert ("rank 2" in str(caught.value)) == (dist.get_rank() != 2)
    agree(None)


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
