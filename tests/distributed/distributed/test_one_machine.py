"""Ranks that read each other's memory get the bits of ranks that send messages."""

import itertools

import pytest
import torch

from megatron.core.distributed.communication import (
    Mesh,
    gather_parameters,
    reduce_gradients,
)
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport.ordered_sum import STRETCH
from megatron.core.transport.shm.shared_buffer import PeerBuffers, SharedBuffer
from megatron.core.transport.shm.shm_bucket_transport import BucketSlot
from megatron.core.transport.work import Work
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, assert_close


def readable(values):
    """Return a copy of a flat tensor that other ranks can read, and its place."""
    memory = SharedBuffer(values.nbytes, num_counters=1)
    return memory.tensor(values.dtype, 0, values.numel()).copy_(values), BucketSlot(
        memory, 0, keeps_pages=False
    )


def meshes(groups):
    yield Mesh(shard=SINGLE_RANK, replicate=groups.dp_cp)
    yield Mesh(shard=groups.dp_cp, replicate=SINGLE_RANK)
    if groups.inter_dist_opt.size() > 1:
        yield Mesh(shard=groups.intra_dp_cp, replicate=groups.inter_dist_opt)


def check_reductions(groups):
    lengths = (128 * 12, 2 * 12 * STRETCH + 128 * 12)
    for mesh, dtype, numel in itertools.product(
        meshes(groups), (torch.float32, torch.bfloat16), lengths
    ):
        torch.manual_seed(groups.dp_cp.rank())
        sent = torch.randn(numel).to(dtype)
        read, place = readable(sent)
        how = dict(scale=1 / 3, tag=5)
        for _ in range(3):  # the same place serves step after step
            Work(reduce_gradients(sent, mesh, **how)).wait()
            Work(reduce_gradients(read, mesh, **how, slot=place)).wait()
            assert_close(mesh.own(read), mesh.own(sent), EXACT, f"{mesh} {dtype} {numel}")
        assert all(isinstance(p, PeerBuffers) for p in place.memory._peers.values())


@distributed(world_size=2)
def test_two_ranks_reduce_to_the_same_bits_either_way(groups):
    check_reductions(groups)


@distributed(world_size=3)
def test_three_ranks_reduce_to_the_same_bits_either_way(groups):
    check_reductions(groups)


@distributed(world_size=4, num_distributed_optimizer_instances=2)
def test_shards_and_copies_of_shards_reduce_to_the_same_bits_either_way(groups):
    check_reductions(groups)


@pytest.mark.parametrize("is_apart", [False, True])
@distributed(world_size=3)
def test_gathers_bring_the_same_values_either_way(groups, is_apart):
    mesh = Mesh(shard=groups.dp_cp, replicate=SINGLE_RANK)
    shard, length = groups.dp_cp.rank(), 1280
    for turn in range(3):
        sent = torch.zeros(3 * length)
        mesh.own(sent).copy_(torch.arange(length) + 10_000 * shard + turn)
        gather_parameters(sent, mesh, tag=9).wait()
        if turn == 0:
            place_of_all, place = readable(torch.zeros(3 * length))
        own = place_of_all[:length] if is_apart else mesh.own(place_of_all)
        own.copy_(mesh.own(sent))
        read = torch.zeros(3 * length) if is_apart else place_of_all
        gather_parameters(read, mesh, tag=9, shard=own if is_apart else None, slot=place).wait()
        assert_close(read, sent, EXACT, "what was gathered")
        place.memory.wait_for_readers()
