"""Replication: gradient buffers, data-parallel reduction, sharded state, gradient finalisation."""

from typing import Any

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"]


def __getattr__(name: str) -> Any:
    """Import FSDP2 at its first use: it takes a quarter of the time of `import torch`."""
    if name == "TorchFullyShardedDataParallel":
        from megatron.core.distributed import torch_fully_sharded_data_parallel

        return torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
