"""Each test of the engine leaves no process group behind."""

import pytest

from megatron_lattice import deepspeed


@pytest.fixture(autouse=True)
def _no_processes():
    yield
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
