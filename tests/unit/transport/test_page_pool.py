"""Tensors that pass their memory on keep their addresses, and only their addresses."""

import sys

import pytest
import torch

from megatron.core.kernels.cpu.malloc import return_free_pages, return_freed_blocks
from megatron.core.transport.shm.page_pool import MAX_SPARE, PagePool
from tests.harness.machine import resident_mib

NUMEL = 3 << 20  # 12 MiB
CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def lender(is_mapped: bool) -> PagePool:
    made = PagePool(CPU)
    made._is_mapped = is_mapped and made._is_mapped
    return made


@pytest.mark.parametrize("is_mapped", [True, False], ids=["pages", "storage"])
def test_views_become_valid_again_when_the_values_come_back(is_mapped):
    lends = lender(is_mapped)
    first, second = (lends.tensor(NUMEL, torch.float32) for _ in range(2))
    first.allocate()
    view = first.tensor[: 4 * 8].view(4, 8).t()
    for value in (1.0, 2.0):
        first.allocate()
        first.tensor.fill_(value)
        assert bool((first.tensor[: 4 * 8].view(4, 8).t() == value).all())
        if is_mapped:
            assert view.data_ptr() == first.tensor.data_ptr() and float(view[7, 3]) == value
        first.free()
        second.allocate()
        second.tensor.fill_(-value)
        second.free()


@linux
def test_tensors_that_take_turns_need_the_memory_of_one():
    lends = lender(True)
    lent = [lends.tensor(NUMEL, torch.float32) for _ in range(8)]
    before = resident_mib()
    addresses = set()
    for turn in range(24):
        tensor = lent[turn % 8]
        tensor.allocate()
        if turn:  # pages come with what was in them
            assert float(tensor.tensor[-1]) == turn - 1
        tensor.tensor.fill_(turn)
        addresses.add(tensor.tensor.data_ptr())
        tensor.free()
    assert len(addresses) == 8
    assert resident_mib() - before < 1.5 * 12
    lends.trim()
    assert resident_mib() - before < 4


@linux
def test_more_spare_memory_than_the_next_tensors_need_goes_back():
    lends = lender(True)
    lent = [lends.tensor(NUMEL, torch.float32) for _ in range(MAX_SPARE + 3)]
    before = resident_mib()
    for tensor in lent:
        tensor.allocate()
        tensor.tensor.fill_(1.0)
    for tensor in lent:
        tensor.free()
    assert resident_mib() - before < (MAX_SPARE + 0.5) * 12


@linux
def test_large_blocks_go_back_to_the_system_when_they_are_freed():
    return_freed_blocks()
    before = resident_mib()
    for _ in range(2):  # glibc would keep the second one
        torch.ones(6 << 20)
        assert resident_mib() - before < 8


@linux
def test_holes_of_the_heap_go_back_when_asked():
    before = resident_mib()
    blocks = [torch.ones(1 << 14) for _ in range(400)]  # 64 KiB each
    kept = blocks[::20]
    del blocks
    return_free_pages()
    assert resident_mib() - before < 8
    assert len(kept) == 20
