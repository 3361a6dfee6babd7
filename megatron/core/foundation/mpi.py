"""MPI as the backend of torch.distributed: a check that torch has it, and its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from megatron.core.foundation.errors import ConfigError, TopologyError

MPI = "mpi"


def mpi_problems(flag: str) -> Iterator[ConfigError]:
    """Yield a problem if torch is built without MPI.

    Args:
        flag: the flag that selects MPI.
    """
    if not dist.is_mpi_available():
        yield ConfigError(
            f"{flag} {MPI}, and this torch has no MPI.",
            rule="torch has MPI only if it was built from source where MPI is installed",
            flags=[flag],
            fix=f"drop {flag} (the device then decides between nccl and gloo), or build torch from "
            "source on a machine with MPI",
        )


def init_mpi_process_group(
    flag: str, timeout: timedelta | None = None, ranks: tuple[int, int] | None = None
) -> None:
    """Create the world process group with MPI, which numbers the ranks itself.

    Never run with MPI, because torch's packages on PyPI are built without it.

    Args:
        timeout: timeout of later groups; MPI itself has no timeout.
        ranks: (rank, world size) of the launcher; None uses MPI's numbers.
    Communication:
        collective on all processes that mpirun started.
    Raises:
        ConfigError: torch has no MPI.
        TopologyError: MPI and the launcher number the ranks differently.
    """
    for problem in mpi_problems(flag):
        raise problem
    dist.init_process_group(MPI, timeout=timeout)
    found = dist.get_rank(), dist.get_world_size()
    if ranks is not None and found != ranks:
        raise TopologyError(
            f"this process is rank {ranks[0]} of {ranks[1]} by its environment, and rank "
            f"{found[0]} of {found[1]} by MPI.",
            rule="MPI numbers the ranks that mpirun starts; RANK, WORLD_SIZE and LOCAL_RANK agree",
            flags=[flag],
            fix="start each rank by mpirun with RANK=$OMPI_COMM_WORLD_RANK "
            "WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK",
        )
