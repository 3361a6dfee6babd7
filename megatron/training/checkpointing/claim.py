"""One run per save directory, decided by rank 0 for all."""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.errors import MegatronError
from megatron.core.transport.object_collectives import ControlGroup, raise_on_all_ranks


def claim_directory(directory: StoragePath, peers: ControlGroup) -> SaveLock | None:
    """Take the lock of a save directory and sweep up what dead runs left there.

    Returns:
        the lock, on the coordinator, if the directory can be locked at all. Whoever claims again
        in the same process gets the same one.
    Raises:
        CheckpointError: another run holds the directory, or it cannot be written; on all ranks.
    Communication:
        one gather and one broadcast over `peers`.
    """
    problem: MegatronError | None = None
    lock: SaveLock | None = None
    if peers.rank == 0:
        try:
            if isinstance(directory, Path):
                lock = SaveLock.acquire(directory)
            for path in commit.remove_leftovers(directory):
                print(f"removed {path}: left by an interrupted save or deletion", flush=True)
        except OSError as error:
            problem = describe_os_error(error, path=str(directory), doing="preparing")
        except MegatronError as error:
            problem = error
    raise_on_all_ranks(problem, peers)
    return lock
