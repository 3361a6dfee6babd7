"""Large blocks of memory ask for huge pages where the system has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.transport.shm.page_pool import PagePool

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def asks_for_huge_pages(address):
    """Return the kernel's mark "hg" of the mapping around an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if "-" in word and not word.endswith(":"):
            begin, end = (int(bound, 16) for bound in word.split("-"))
            is_inside = begin <= address < end
        elif is_inside and word == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"no mapping around {address:x}")


@linux
def test_large_tensors_of_a_process_that_imports_the_framework():
    source = (
        "import torch, megatron.core.foundation.device\n"
        "from tests.unit.foundations.test_huge_pages import asks_for_huge_pages\n"
        "values = torch.ones(4 << 20)\n"
        "print(asks_for_huge_pages(values.data_ptr() + (4 << 20)))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    found = subprocess.run(
        [sys.executable, "-c", source], env=environment, check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(HAS_HUGE_PAGES)


@linux
def test_gathered_layers():
    lent = PagePool(torch.device("cpu")).tensor(3 << 20, torch.float32)
    lent.allocate()
    assert asks_for_huge_pages(lent.tensor.data_ptr()) == HAS_HUGE_PAGES
