"""Read this process's rank from the launcher's environment, before any connection."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.foundation import device, optional_imports
from megatron.core.foundation.process_identity import stat_of
from megatron.core.foundation.rendezvous import rendezvous
from megatron.training.config.resolved import Machine


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process, and the size of the job."""

    rank: int
    local_rank: int
    world_size: int
    is_launched: bool
    """Whether a launcher such as torchrun started this process."""
    local_world_size: int = 1
    """Ranks on this node; 1 if the launcher does not set it."""


def read_rank_info() -> RankInfo:
    """Read RANK, LOCAL_RANK and WORLD_SIZE; without them the process is the whole job."""
    env = os.environ
    is_launched = "RANK" in env and "WORLD_SIZE" in env
    return RankInfo(
        rank=int(env.get("RANK", "0")) if is_launched else 0,
        local_rank=int(env.get("LOCAL_RANK", "0")) if is_launched else 0,
        world_size=int(env.get("WORLD_SIZE", "1")) if is_launched else 1,
        is_launched=is_launched,
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")) if is_launched else 1,
    )


def read_machine() -> Machine:
    """Return the properties of rank and machine that affect derived settings."""
    has_engine_layers = (
        device.device_type() == "cuda"
        and optional_imports.has("transformer_engine")
        and optional_imports.has("megatron.core.extensions")
        and optional_imports.has("megatron.core.extensions.transformer_engine")
    )
    return Machine(
        rank=int(os.environ.get("RANK", "0")),
        communication_backend=device.communication_backend(),
        has_engine_layers=has_engine_layers,
    )


def is_on_several_machines() -> bool:
    """Return whether torchrun started fewer processes on this machine than the job has."""
    env = os.environ
    return int(env.get("LOCAL_WORLD_SIZE", "1")) < int(env.get("WORLD_SIZE", "1")) and (
        "LOCAL_WORLD_SIZE" in env
    )


def launcher_process() -> int | None:
    """Return the process id of the torchrun that started this rank, or None."""
    process = _first_ancestor_without_the_mark_of_this_rank()
    return process if process is not None and (process > 1 or _is_python(process)) else None


def has_lost_its_launcher() -> bool:
    """Return whether the torchrun that started this rank has already ended.

    The parent of an orphan is process 1, which may be torchrun itself in a container.
    """
    process = _first_ancestor_without_the_mark_of_this_rank()
    return process == 1 and not _is_python(process)


def _first_ancestor_without_the_mark_of_this_rank() -> int | None:
    """Return the first ancestor without this rank's error file in its environment; None if torchrun
    set no error file, or if the environment of an ancestor is not readable.

    A shell or a profiler between torchrun and this process does not end if torchrun is killed.
    """
    mark = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not mark or not Path("/proc/self/stat").exists():
        return None
    wanted = f"TORCHELASTIC_ERROR_FILE={mark}".encode()
    process = os.getppid()
    try:
        while process > 1 and wanted in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            process = stat_of(process).parent
    except OSError:  # a process of another user
        return None
    return process


def _is_python(process: int) -> bool:
    """Return whether a process runs Python, True if that is unknown."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True
    return b"python" in command.split(b"\0")[0] or b"torchrun" in command


def connect_store(info: RankInfo, timeout: timedelta) -> Any:
    """Return the key-value store that all ranks of the job share, before any process group.

    Ranks use it to compare their settings, and after a failure to choose the rank that reports it.
    It contains no keys of earlier attempts if torchrun restarts the job.

    Raises:
        TopologyError: the store is not reachable, or ranks are missing.
    """
    if not info.is_launched or info.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    return rendezvous(info.rank, info.world_size, timeout)
