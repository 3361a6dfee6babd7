"""Which accelerator a rank computes on, where the node has fewer of them than ranks."""

import pytest
import torch

from megatron.core.foundation import device
from megatron.core.foundation.errors import TopologyError


@pytest.fixture
def bound(monkeypatch):
    """The accelerators that ranks were bound to, on a node with two."""
    found = []
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(device, "current_device", lambda: torch.device("cuda", found[-1]))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    return found


def test_each_rank_has_an_accelerator_of_its_own_where_there_are_enough(bound):
    for rank in range(2):
        assert device.set_local_device(rank) == torch.device("cuda", rank)


def test_a_rank_without_one_is_refused_under_nccl(bound):
    with pytest.raises(TopologyError, match="LOCAL_RANK is 2 on a node with 2 GPUs") as caught:
        device.set_local_device(2)
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in str(caught.value)
    assert bound == []


@pytest.mark.parametrize(("backend", "value"), [("nccl", "1"), ("gloo", None)])
def test_ranks_take_turns_where_they_may_share(backend, value, bound, monkeypatch):
    if value:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", value)
    for rank in range(5):
        device.set_local_device(rank, backend=backend)
    assert bound == [0, 1, 0, 1, 0]
