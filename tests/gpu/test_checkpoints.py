"""State on the accelerator: saved from it, loaded into it, copied away for asynchronous saves."""

from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.foundation.device import current_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_async", [False, True])
def test_device_tensors_come_back_exactly_on_the_device(is_async: bool, tmp_path: Path) -> None:
    device = current_device()
    assert device.type != "cpu"
    tensors = {
        "matrix": torch.randn(700, 900, device=device, dtype=torch.bfloat16),
        "strided": torch.randn(64, 96, device=device).t(),
        "scalar": torch.tensor(2.5, device=device),
    }
    expected = {key: tensor.clone() for key, tensor in tensors.items()}

    def declared() -> dict[str, ShardedTensor]:
        return {key: ShardedTensor.from_rank_offsets(key, t) for key, t in tensors.items()}

    handle = dist_checkpointing.save(
        declared(), tmp_path / "iter_0000001", async_sharded_save=is_async
    )
    for tensor in tensors.values():
        tensor.zero_()
    if handle is not None:
        handle.finish()
    loaded = dist_checkpointing.load(declared(), tmp_path / "iter_0000001")
    for key, tensor in expected.items():
        assert loaded[key].device == device
        assert torch.equal(loaded[key], tensor)
