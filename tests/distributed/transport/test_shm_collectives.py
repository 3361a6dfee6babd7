"""Shared memory between the ranks of one machine: the sums of the backend, and no trace left."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.foundation.errors import CollectiveMismatchError, TopologyError
from megatron.core.foundation.process_identity import ProcessIdentity
from megatron.core.transport import collectives
from megatron.core.transport.shm import shm_collectives
from megatron.core.transport.shm.shm_collectives import (
    DIRECTORY,
    SLOT_BYTES,
    ShmGroup,
    open_shm_group,
)
from tests.harness.distributed import DistributedFailure, distributed, run_distributed
from tests.harness.machine import no_shared_memory

EDGE = SLOT_BYTES // 4
"""fp32 elements that fill a slot."""


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    """Small whole numbers: their sums are exact in any order and dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=generator).float()


@distributed(world_size=2)
def test_both_ranks_hear_of_operations_that_do_not_match(groups):
    group, rank = groups.dp, groups.dp.rank()
    with pytest.raises(CollectiveMismatchError, match="rank 0.* all_reduce of 8 elements"):
        collectives.all_reduce(torch.ones(8 - 4 * rank), group)
    collective = (collectives.all_gather, collectives.all_reduce)[rank]
    with pytest.raises(CollectiveMismatchError, match="rank 0.* all_gather of 8 elements"):
        collective(torch.ones(8), group)
    assert collectives.all_reduce(torch.ones(3), group).tolist() == [2.0] * 3


def group_without_shared_memory() -> dist.ProcessGroup:
    """Return a group of all ranks that uses its backend for everything."""
    group = dist.new_group(list(range(dist.get_world_size())))
    with no_shared_memory():
        assert open_shm_group(group) is None
    return group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@distributed(world_size=3)
def test_collectives_equal_those_of_the_backend(groups, dtype):
    shared, plain = groups.dp, group_without_shared_memory()
    assert isinstance(open_shm_group(shared), ShmGroup)
    rank = shared.rank()
    for rows in (0, 3, 30, EDGE // 10, 3 * EDGE // 10 + 3):
        x = of_rank(rank, rows - rows % 3, 10).to(dtype)
        for collective in (
            collectives.all_gather,
            collectives.reduce_scatter,
            lambda x, group: collectives.all_reduce(x.clone(), group),
        ):
            assert torch.equal(collective(x, shared), collective(x, plain)), (rows, collective)


@distributed(world_size=2)
def test_transfers_may_be_started_together_and_awaited_in_any_order(groups):
    group, other = groups.dp, 1 - groups.dp.rank()
    own = [of_rank(10 * i + group.rank(), 1 + i * EDGE // 2) for i in range(5)]
    theirs = [of_rank(10 * i + other, 1 + i * EDGE // 2) for i in range(5)]
    pending = [collectives.start_all_reduce(x.clone(), group) for x in own]
    for i in (3, 0, 4, 2, 1):
        assert torch.equal(pending[i].wait(), own[i] + theirs[i])


@distributed(world_size=2)
def test_each_rank_waits_for_the_slower_one(groups):
    group = groups.dp
    for turn in range(6):
        if turn % 2 == group.rank():
            time.sleep(0.02)
        total = collectives.all_reduce(torch.full((EDGE,), float(turn)), group)
        assert torch.equal(total, torch.full((EDGE,), 2.0 * turn))


@distributed(world_size=2)
def test_a_slow_rank_is_waited_for_with_a_thousand_files_open(groups):
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        group = dist.new_group([0, 1])
        assert isinstance(open_shm_group(group), ShmGroup)
        if group.rank() == 0:
            time.sleep(2.5 * shm_collectives.LIVENESS_SECONDS)
        total = collectives.all_reduce(torch.ones(3), group)
        assert total.tolist() == [2, 2, 2]
    finally:
        for file in files:
            os.close(file)


@distributed(world_size=2)
def test_the_mapping_has_no_name_once_the_ranks_are_attached(groups):
    assert open_shm_group(groups.dp) is not None
    dist.barrier()
    assert not list(DIRECTORY.glob("megatron-*"))


@distributed(world_size=2)
def test_a_missing_part_turns_it_off_on_all_ranks(groups):
    if groups.dp.rank() == 1:
        shm_collectives.DIRECTORY = DIRECTORY / "another-machine"
    try:
        assert open_shm_group(groups.dp) is None
    finally:
        shm_collectives.DIRECTORY = DIRECTORY
    assert collectives.all_reduce(torch.ones(3), groups.dp).tolist() == [2.0] * 3


@pytest.mark.parametrize("field", ["number", "namespace", "start", "machine"])
@distributed(world_size=2)
def test_ranks_that_do_not_see_each_others_processes_use_their_backend(groups, field):
    # A number that means somebody else here: of another container, or used again.
    own = ProcessIdentity.own()
    strange = {"number": 1, "namespace": 1, "start": own.start + 1, "machine": bytes(16)}
    if groups.dp.rank() == 1:
        changed = own._replace(**{field: strange[field]})
        shm_collectives.ProcessIdentity = SimpleNamespace(
            own=lambda: changed, unpack=ProcessIdentity.unpack
        )
    try:
        assert open_shm_group(groups.dp) is None
    finally:
        shm_collectives.ProcessIdentity = ProcessIdentity
    assert collectives.all_reduce(torch.ones(3), groups.dp).tolist() == [2.0] * 3


@distributed(world_size=2)
def test_a_rank_does_not_watch_itself_for_another_one(groups):
    # Both are the first process of their container: the same number, and here the same process.
    if groups.dp.rank() == 1:
        theirs = ProcessIdentity.own()
        with pytest.raises(ProcessLookupError, match="is this one"):
            theirs.open()
    dist.barrier()


@distributed(world_size=2)
def test_a_rank_that_does_not_come_is_named_after_the_timeout(groups):
    exchange = open_shm_group(groups.dp)
    assert exchange is not None
    exchange.timeout = 0.5
    if groups.dp.rank() == 0:
        with pytest.raises(TopologyError, match="rank 1 of the group"):
            collectives.all_reduce(torch.ones(3), groups.dp)
    dist.barrier()


def die_before_the_sum(groups):
    collectives.all_reduce(torch.ones(3), groups.dp)
    if groups.dp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.all_reduce(torch.ones(3), groups.dp)


def test_the_death_of_a_rank_ends_the_wait_of_the_others():
    start = time.monotonic()
    with pytest.raises(DistributedFailure, match="its process has ended|died|killed"):
        run_distributed(die_before_the_sum, 2)
    assert time.monotonic() - start < 30
