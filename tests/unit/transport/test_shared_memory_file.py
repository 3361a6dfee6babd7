"""The memory that ranks of a machine share keeps its size."""

import os
import sys

import pytest

from megatron.core.transport.shm import shared_buffer


@pytest.mark.parametrize("length", [0, 8192])
def test_a_file_in_memory_cannot_be_cut_off(length, monkeypatch):
    """A process that has mapped a file which becomes shorter dies of SIGBUS."""
    assert sys.platform == "linux"
    monkeypatch.setattr(shared_buffer, "is_off", lambda: False)
    descriptor = shared_buffer._file_in_memory(4096)
    assert descriptor is not None
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # as a peer gets it
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(other, length)
        assert os.fstat(other).st_size == 4096
    finally:
        os.close(other)
        os.close(descriptor)
