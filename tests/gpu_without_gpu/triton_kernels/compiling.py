"""Each kernel compiles for four generations of GPUs within their registers and shared memory."""

import os

import pytest

from tests.gpu_without_gpu.triton_kernels.resources import CASES, SHARED_LIMIT, resources

assert not os.environ.get("TRITON_INTERPRET"), "the interpreter takes the place of the compiler"


@pytest.mark.parametrize("target", SHARED_LIMIT)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_fits(name, target):
    found = resources(name, target)
    assert found.spilled_bytes == 0
    assert found.registers <= 255
    assert found.shared_bytes <= SHARED_LIMIT[target]
