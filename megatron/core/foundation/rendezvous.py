"""The rendezvous store of one attempt of a job that its launcher starts again after a failure.

torchrun keeps its store over all attempts, including the keys of earlier attempts: addresses of
ended processes, counters that have reached their ends. Its attempt number does not distinguish
attempts: each node counts its own attempts, and a change of nodes does not raise the number. So
ranks use a prefix that rank 0 draws: each rank requests it with a token of its own, and only the
rank 0 of the current attempt can answer that token.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.foundation.errors import TopologyError

START_TIMEOUT = timedelta(minutes=10)
"""Timeout of ranks that wait for each other before any flags, also the timeout's, are read."""
POLL_S = 0.01
"""Interval of rank 0's checks for requests of other ranks."""


def restart_count() -> int:
    """Return how often the launcher has started this node's ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_store_host(rank: int) -> bool:
    """Return whether this process hosts the store: rank 0, unless its launcher hosts it."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def launcher_is_store_host() -> bool:
    """Return whether the torchrun that started this process hosts the store."""
    env = os.environ
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("GROUP_RANK") == "0"


def rendezvous(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Connect to the launcher's store, and return the part of it that belongs to this attempt.

    Raises:
        TopologyError: the store cannot be reached, or ranks are missing.
    """
    endpoint = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise TopologyError(
            f"rank {rank} of {world_size} cannot reach the store of the job at {endpoint}: "
            f"{str(error).splitlines()[0]}",
            rule="rank 0's node listens at MASTER_ADDR:MASTER_PORT",
            fix="check that every node runs torchrun with the same --nnodes and --rdzv-endpoint "
            "(or --master-addr and --master-port), and that the port is open",
        ) from error
    return join_rendezvous(store, rank, world_size, timeout)


def join_rendezvous(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Wait for the other ranks in `store`, and return a part of it that was never used before.

    Raises:
        TopologyError: ranks are missing; on rank 0 the message names them.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        _answer_all(store, name, world_size, timeout)
    else:
        token = secrets.token_hex(8)
        store.set(f"asks/{rank}", token)
        try:
            store.wait([f"answer/{token}"], timeout)
        except RuntimeError as error:
            raise _missing("rank 0", rank, world_size, timeout) from error
        name = store.get(f"answer/{token}").decode()
        store.add(f"{name}/num_joined", 1)
        store.set(f"{name}/joined/{rank}", "1")
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _answer_all(store: Any, name: str, world_size: int, timeout: timedelta) -> None:
    """Answer requests with the name of the attempt, until all ranks have joined it."""
    answered: dict[int, str] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"{name}/num_joined", 0) < world_size - 1:
        for rank in range(1, world_size):
            # A rank that has joined sends no new token; a token may be left from an old attempt.
            if store.check([f"asks/{rank}"]):
                token = store.get(f"asks/{rank}").decode()
                if answered.get(rank) != token:
                    store.set(f"answer/{token}", name)
                    answered[rank] = token
        if time.monotonic() > deadline:
            absent = [r for r in range(1, world_size) if not store.check([f"{name}/joined/{r}"])]
            who = "ranks " + ", ".join(map(str, absent[:8])) if absent[1:] else f"rank {absent[0]}"
            more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
            raise _missing(who + more, 0, world_size, timeout)
        time.sleep(POLL_S)


def _missing(who: str, rank: int, world_size: int, timeout: timedelta) -> TopologyError:
    return TopologyError(
        f"rank {rank} of {world_size} waited {timeout} for {who} to start.",
        rule="all ranks of the job start together",
        flags=["--distributed-timeout-minutes"],
        fix="check that every node runs torchrun with the same --nnodes and --rdzv-endpoint",
    )
