"""Values of several ranks side by side at one range of addresses."""

import random
import time

import torch
import torch.distributed as dist

from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport.shm.mapped_gather import MappedTensor, map_gather
from megatron.core.transport.shm.shared_buffer import SharedBuffer, round_up_to_pages
from tests.harness.distributed import distributed
from tests.harness.machine import no_shared_memory, resident_mib

PAGE = round_up_to_pages(1)
NUMEL = 1 << 20
"""Of a rank's values, where their memory is measured."""


def joined_whole(groups, numel=PAGE):
    """Return (own values, what is joined of all ranks) of one piece a rank."""
    memory = SharedBuffer(4 * numel, 1)
    values = memory.tensor(torch.float32, 0, numel)
    joined = map_gather(memory, groups.dp, torch.float32, [[(0, 4 * numel)]])
    assert joined is not None
    return values, joined


@distributed(world_size=3)
def test_each_rank_finds_the_pieces_of_all_in_order(groups):
    rank, size = groups.dp.rank(), groups.dp.size()
    for seed in range(10):
        draw = random.Random(seed)  # equal on all ranks
        lengths = [draw.randint(1, 5) for _ in range(draw.randint(1, 6))]
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        order = draw.sample(range(len(lengths)), len(lengths))
        cuts = sorted(draw.sample(range(len(order) + 1), min(2, len(order))))
        tensors = [
            order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True) if b > a
        ]
        memory = SharedBuffer(PAGE * sum(lengths), 1)
        values = memory.tensor(torch.int32, 0, PAGE // 4 * sum(lengths))
        layouts = [[(PAGE * begins[i], PAGE * lengths[i]) for i in pieces] for pieces in tensors]
        joined = map_gather(memory, groups.dp, torch.int32, layouts)
        for turn in range(3):
            owned = torch.arange(values.numel(), dtype=torch.int32) + 1_000_000 * turn
            values.copy_(owned + 100_000 * rank)
            joined.start().wait()
            for pieces, found in zip(tensors, joined.tensors, strict=True):
                found.allocate()
                expected = [
                    owned[PAGE // 4 * begins[i] :][: PAGE // 4 * lengths[i]] + 100_000 * other
                    for i in pieces
                    for other in range(size)
                ]
                assert torch.equal(found.tensor, torch.cat(expected)), (seed, turn)
                found.free()
            joined.wait_for_readers()


@distributed(world_size=2)
def test_what_is_written_to_a_joined_tensor_reaches_no_owner_and_is_lost(groups):
    values, joined = joined_whole(groups)
    values.fill_(1.0)
    whole = joined.tensors[0]
    joined.start().wait()
    whole.allocate()
    whole.tensor.fill_(7.0)
    dist.barrier()
    assert bool((values == 1.0).all())
    whole.free()
    whole.allocate()
    assert bool((whole.tensor == 1.0).all())
    joined.wait_for_readers()


@distributed(world_size=2)
def test_values_do_not_change_while_another_rank_looks_at_them(groups):
    values, joined = joined_whole(groups)
    values.fill_(1.0)
    whole, rank = joined.tensors[0], groups.dp.rank()
    joined.start().wait()
    if rank == 0:
        time.sleep(0.2)
        assert bool((whole.tensor == 1.0).all())
    joined.wait_for_readers()
    values.fill_(2.0)
    if rank == 0:
        time.sleep(0.2)  # the other one is told only now that these are in place
    joined.start().wait()
    assert bool((whole.tensor == 2.0).all())
    joined.wait_for_readers()


@distributed(world_size=2)
def test_an_empty_tensor_holds_no_memory_of_this_process(groups):
    values, joined = joined_whole(groups, NUMEL)
    values.fill_(1.0)
    whole = joined.tensors[0]
    dist.barrier()
    before = resident_mib()
    whole.allocate()
    assert float(whole.tensor.sum()) == 2 * NUMEL
    assert resident_mib() - before > 7.5
    whole.free()
    assert resident_mib() - before < 0.5
    dist.barrier()


def test_a_rank_alone_looks_at_its_own_values():
    memory = SharedBuffer(2 * PAGE, 1)
    memory.tensor(torch.uint8, 0, 2 * PAGE).copy_(torch.arange(2 * PAGE) // PAGE + 1)
    joined = map_gather(memory, SINGLE_RANK, torch.uint8, [[(PAGE, PAGE)], [(0, PAGE)]])
    assert joined.start().is_completed()
    assert [tensor.tensor.unique().tolist() for tensor in joined.tensors] == [[2], [1]]
    joined.wait_for_readers()


@distributed(world_size=2)
def test_where_one_rank_cannot_join_no_rank_does(groups):
    memory = SharedBuffer(PAGE, 1)
    found = MappedTensor.map_piece

    def fail(*_):
        raise OSError(12, "too many mappings")

    if groups.dp.rank() == 1:
        MappedTensor.map_piece = fail
    try:
        assert map_gather(memory, groups.dp, torch.uint8, [[(0, PAGE)]]) is None
    finally:
        MappedTensor.map_piece = found


@distributed(world_size=2)
def test_values_that_others_cannot_read_are_not_joined(groups):
    with no_shared_memory():
        memory = SharedBuffer(PAGE, 1)
        assert map_gather(memory, groups.dp, torch.uint8, [[(0, PAGE)]]) is None
        assert map_gather(memory, None, torch.uint8, [[(0, PAGE)]]) is None
