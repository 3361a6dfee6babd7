"""Values that are in a file are in memory only while they are used."""

import mmap
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core.offload.file_state_store import reserve_file
from megatron.core.transport.shm.shared_buffer import SharedBuffer

NUMEL = 1 << 18


def resident_bytes():
    """Return what of files of offloaded state is in this process's memory."""
    total, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the first line of a mapping
            is_of_file = "/offload-" in line
        elif is_of_file and name == "Rss:":
            total += int(values[0]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_values_leave_memory_and_stay_in_the_file(tmp_path):
    reserve = partial(reserve_file, tmp_path, flag="--param-offload-path")
    memory = SharedBuffer(4 * NUMEL, 1, reserve=reserve)
    values = memory.tensor(torch.float32, 0, NUMEL).copy_(torch.arange(NUMEL))
    assert resident_bytes() >= values.nbytes
    memory.page_out(values)
    assert resident_bytes() <= mmap.PAGESIZE  # the words
    memory.prefetch(values)
    assert torch.equal(values, torch.arange(NUMEL).float())
    assert not list(tmp_path.iterdir())
