"""State that some ranks take from the memory of others after one is lost."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.collective import run_collectively
from megatron.core.dist_checkpointing.loader import load_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.dist_checkpointing.shard_plan import neighbour_distance
from megatron.core.transport.object_collectives import control_group
from tests.harness.distributed import distributed

ROWS = 12
NODES = [0, 0, 1, 1]


def declare(rank, size, values):
    """Return the state of a rank: a weight that all hold, and its rows of a moment."""
    mine = values[rank * ROWS // size : (rank + 1) * ROWS // size].clone()
    weight = ShardedTensor.from_rank_offsets("weight", values.clone(), replica_id=rank)
    odd = torch.tensor([float(values[0, 0])] * 3, dtype=torch.bfloat16)
    return {
        "weight": weight,
        "odd": ShardedTensor.from_rank_offsets("odd", odd, replica_id=rank),
        "moment": ShardedTensor.from_rank_offsets("moment", mine, (0, rank, size)),
        "iteration": int(values[0, 0]),
    }


def values_of(iteration):
    return torch.arange(2 * ROWS, dtype=torch.float32).view(ROWS, 2) + iteration


def copies_of(iterations):
    copies = MemoryCopies()
    rank = dist.get_rank()
    opened = copies.open(dist.group.WORLD, NODES[rank])
    for iteration in iterations:
        state = declare(rank, 4, values_of(iteration))
        opened.save(lambda state=state: state, iteration, {})
    return copies


def assert_restored(copies, living, iteration):
    """Compare what the living ranks read, in their own layout, with what was copied."""
    group = dist.new_group(living)
    if dist.get_rank() not in living:
        return
    rank, size = group.rank(), len(living)
    opened = copies.open(group, NODES[dist.get_rank()])
    newest = opened.newest()
    assert newest is not None and newest[0] == iteration, newest
    template = declare(rank, size, torch.zeros(ROWS, 2))
    peers = control_group(group)
    contents = run_collectively(peers, "opening", lambda: opened.contents(newest))
    state = load_state(template, contents, peers=peers).state
    expected = declare(rank, size, values_of(iteration))
    for key in ("weight", "odd", "moment"):
        assert torch.equal(state[key], expected[key].data), key
    assert state["iteration"] == expected["iteration"]


@pytest.mark.parametrize("living", [[0, 1, 2, 3], [0, 1, 2], [0, 3], [0, 1], [2, 3]], ids=str)
@distributed(world_size=4)
def test_living_ranks_read_all_of_the_newest_copy(groups, living):
    assert_restored(copies_of([3, 4, 5]), living, 5)


@distributed(world_size=4)
def test_what_only_lost_ranks_had_is_missed(groups):
    copies = copies_of([3])
    living = [1, 3]  # 2 had the copy of 0, and 0 that of 2
    group = dist.new_group(living)
    if dist.get_rank() in living:
        assert copies.open(group, 0).newest() is None


@distributed(world_size=4)
def test_a_copy_that_one_rank_has_not_finished_is_passed_over_for_the_one_before(groups):
    copies = copies_of([3, 4])
    if dist.get_rank() == 1:
        unfinished = max(copies.copies, key=lambda copy: copy.key)
        unfinished.key = (-1, -1)
    assert_restored(copies, [0, 1], 3)


def test_the_neighbour_is_on_another_node():
    assert neighbour_distance([0, 0, 1, 1]) == 2
    assert neighbour_distance([0, 0, 0]) == 1
    assert neighbour_distance([0]) == 0
