"""Settings of every test process: one thread, the CPU, and the same random state for each test."""

import os

# Before torch is imported: a run on a machine with a GPU must give the same numbers.
os.environ.setdefault("LATTICE_DEVICE", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from megatron.core.foundation import device
from tests.harness import reaper
from tests.harness.global_state import reset_global_state
from tests.harness.order import longest_first
from tests.harness.pool import POOL

reaper.start()
torch.set_num_threads(1)
# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with what takes longest."""
    longest_first(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the ranks before pytest prints its summary."""
    POOL.shutdown()


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    reset_global_state()


@pytest.fixture(autouse=True)
def _device_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests marked `gpu` on the accelerator, or skip them where there is none."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if not torch.accelerator.is_available():
        pytest.skip("needs a GPU; torch sees none on this machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LATTICE_DEVICE")
        device.device_type.cache_clear()
        yield
    device.device_type.cache_clear()
