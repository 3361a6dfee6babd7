"""`deepspeed.comm`: the names of torch.distributed, and creation of the process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron.core.foundation import device
from megatron.core.foundation.mpi import MPI, init_mpi_process_group
from megatron.core.foundation.rendezvous import START_TIMEOUT, rendezvous


def __getattr__(name: str) -> Any:
    """Return the function or type of torch.distributed of that name."""
    return getattr(dist, name)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Bind this process to its device and create the process group, if there is none.

    The launcher sets the ranks (torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT). Without a launcher, this process is the only rank.

    Args:
        dist_backend: by default nccl or gloo, depending on the device. "mpi" uses mpirun's ranks.
        rank, world_size: replace the launcher's values.
        auto_mpi_discovery, verbose, config: accepted and ignored.
    Raises:
        ConfigError: "mpi" with a torch that is built without MPI.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    backend = dist_backend or device.communication_backend()
    device.set_local_device(int(os.environ.get("LOCAL_RANK", 0)), backend=backend)
    if dist_backend == MPI:
        ranks = (rank, world_size) if world_size > 0 else None
        init_mpi_process_group("dist_backend", timeout, ranks)
        return
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if world_size > 0:
        options |= {"rank": rank, "world_size": world_size}
    if "RANK" not in os.environ and init_method is None and world_size < 0:
        options |= {"store": HashStore(), "rank": 0, "world_size": 1}
    else:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        launched_size = int(os.environ.get("WORLD_SIZE", "1"))
        if init_method is None and world_size < 0 and launched_size > 1:
            # torch reads the same variables, but may connect to ranks of an earlier attempt.
            this_rank = int(os.environ["RANK"])
            store = rendezvous(this_rank, launched_size, timeout or START_TIMEOUT)
            options |= {"store": store, "rank": this_rank, "world_size": launched_size}
        else:
            options["init_method"] = init_method
    dist.init_process_group(backend, **options)


def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 before `init_distributed`."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of processes; 1 before `init_distributed`."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))
