"""Memory that other ranks of the machine read in place: what they see, when, and where it fails."""

import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from megatron.core.foundation.errors import TopologyError
from megatron.core.transport.shm import shared_buffer
from megatron.core.transport.shm.shared_buffer import PeerBuffers, SharedBuffer, round_up_to_pages
from tests.harness.distributed import distributed
from tests.harness.machine import no_shared_memory

NUMEL = 5000


def filled(rank: int, num_counters: int = 2) -> tuple[SharedBuffer, torch.Tensor]:
    memory = SharedBuffer(4 * NUMEL, num_counters)
    values = memory.tensor(torch.float32, 0, NUMEL)
    assert torch.equal(values, torch.zeros(NUMEL))
    return memory, values.copy_(torch.arange(NUMEL) + 10_000 * rank)


@distributed(world_size=3)
def test_each_rank_reads_the_values_that_the_others_show_where_they_lie(groups):
    rank, size = groups.dp.rank(), groups.dp.size()
    memory, values = filled(rank)
    peers = memory.peers(groups.dp)
    assert isinstance(peers, PeerBuffers) and memory.peers(groups.dp) is peers
    shown = values[100 * rank :]  # another place on each rank
    memory.publish_progress(1, 1, shown)
    peers.progress_of_others(1, 1).wait()
    for other in set(range(size)) - {rank}:
        found = peers.read(other, 1, 7, torch.empty(40))
        first = 10_000 * other + 100 * other + 7
        assert torch.equal(found, torch.arange(first, first + 40).float())
        peers.unmap(other, found)
    dist.barrier()


@distributed(world_size=2)
def test_a_rank_is_seen_only_when_it_has_come(groups):
    rank = groups.dp.rank()
    memory, values = filled(rank)
    peers = memory.peers(groups.dp)
    dist.barrier()
    for turn in range(1, 6):
        if turn % 2 == rank:
            assert not peers.progress_of_others(0, turn).is_completed()
            dist.barrier()
            peers.progress_of_others(0, turn).wait()
            other = peers.read(1 - rank, 0, 0, values)
            assert torch.equal(other, torch.full((NUMEL,), float(turn)))
            memory.publish_progress(0, turn, values)
        else:
            dist.barrier()
            time.sleep(0.02)
            memory.publish_progress(0, turn, values.fill_(turn))
            memory.wait_for_readers()


@distributed(world_size=2)
def test_discarded_pages_are_zero_again(groups):
    memory = SharedBuffer(3 * round_up_to_pages(1), 1)
    values = memory.tensor(torch.uint8, 0, 3 * round_up_to_pages(1)).fill_(1)
    memory.discard(values[round_up_to_pages(1) : 2 * round_up_to_pages(1)])
    assert values.sum() == 2 * round_up_to_pages(1)


@distributed(world_size=2)
def test_no_rank_can_cut_the_memory_that_others_read(groups):
    memory = SharedBuffer(round_up_to_pages(1), 1)
    file = memory.open_file()
    for length in (0, 100 * round_up_to_pages(1)):
        with pytest.raises(PermissionError):
            os.ftruncate(file, length)
    os.close(file)


@distributed(world_size=2)
def test_a_file_that_is_not_the_described_one_is_not_opened(groups):
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as other:
        card = shared_buffer._File.of(file.fileno(), 0)
        os.close(card.open())
        for strange in (
            card._replace(descriptor=other.fileno()),
            card._replace(device=card.device + 1),
        ):
            with pytest.raises(FileNotFoundError):
                strange.open()


@distributed(world_size=2)
def test_where_one_rank_cannot_read_no_rank_does(groups):
    memory, values = filled(groups.dp.rank())
    found, shared_buffer._map_of = shared_buffer._map_of, shared_buffer._map_of
    if groups.dp.rank() == 1:
        shared_buffer._map_of = lambda *_: None
    try:
        assert memory.peers(groups.dp) is None
    finally:
        shared_buffer._map_of = found


@distributed(world_size=2)
def test_without_the_exchange_the_values_are_ordinary_memory(groups):
    with no_shared_memory():
        memory, values = filled(groups.dp.rank())
        assert memory.peers(dist.new_group([0, 1])) is None
        assert values[-1] == NUMEL - 1 + 10_000 * groups.dp.rank()


@distributed(world_size=2)
def test_a_rank_that_does_not_come_is_named_after_the_timeout(groups):
    memory, values = filled(groups.dp.rank())
    peers = memory.peers(groups.dp)
    exchange = peers._exchange
    timeout, exchange.timeout = exchange.timeout, 0.5
    try:
        with pytest.raises(TopologyError, match="of the group"):
            peers.progress_of_others(0, 1).wait()
    finally:
        exchange.timeout = timeout
    dist.barrier()
