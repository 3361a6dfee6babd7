"""Which shards a process works on, and which shards there are: plain arithmetic on ranks, names and
the environment of schedulers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from megatron.core.foundation.errors import ConfigError, DataError

_SHARD = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(_.*)")


def shard_name(prefix: str, shard: int, num_shards: int) -> str:
    """Return the output prefix of one shard; names sort in the order of the shards."""
    return prefix if num_shards == 1 else f"{prefix}-{shard:05d}-of-{num_shards:05d}"


def rank_and_world(
    num_shards: int,
    rank: int | None,
    world_size: int | None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[int, int]:
    """Return (rank, processes) of this process among those that share the shards.

    The flags come first, then a SLURM array, SLURM's process number, and torchrun's variables. A
    task of an array is one of `world_size`, by default of `num_shards`, whatever part of the
    array was submitted: a killed task can be submitted again alone.

    Raises:
        ConfigError: the rank is not below the number of processes.
    """
    found = "--rank"
    if rank is None and "SLURM_ARRAY_TASK_ID" in environment:
        found = "SLURM_ARRAY_TASK_ID"
        rank, world_size = int(environment[found]), world_size or num_shards
    elif rank is None:
        for found, size in (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")):
            if found in environment and size in environment:
                rank, world_size = int(environment[found]), int(environment[size])
                break
        else:
            rank, world_size = 0, world_size or 1
    world_size = world_size or num_shards
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{found} {rank} among {world_size} processes.",
            rule="ranks are numbered from 0 and are below the number of processes",
            flags=["--rank", "--world-size", "--num-shards"],
            fix=f"submit an array of 0-{world_size - 1}",
        )
    return rank, world_size


def shards_of(rank: int, world_size: int, num_shards: int) -> range:
    """Return the shards that a process works on, one after the other."""
    return range(rank, num_shards, world_size)


def by_kind(prefixes: Sequence[str]) -> dict[str, list[str]]:
    """Group the corpora of shards by what they hold: the end of the name, "_text_document".

    Returns:
        kind -> prefixes in the order given; all under one kind, "", if one of them is no shard.
    """
    kinds: dict[str, list[str]] = {}
    for prefix in prefixes:
        match = _SHARD.fullmatch(prefix)
        if match is None:
            return {"": list(prefixes)}
        kinds.setdefault(match[4], []).append(prefix)
    return kinds


def refuse_missing_shards(prefixes: Sequence[str]) -> None:
    """Refuse a folder in which shards of an output are missing: an array task that died.

    Raises:
        DataError: names the first.
    """
    found: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, prefixes)):
        found.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (output, num_shards, kind), shards in found.items():
        missing = sorted(set(range(int(num_shards))) - shards)
        if missing:
            raise DataError(
                f"{len(missing)} of {int(num_shards)} shards of {output} are missing, "
                f"{shard_name(output, missing[0], int(num_shards))}{kind} first.",
                rule="the shards of a folder are joined when all of them are there",
                flags=["--input"],
                fix=f"run task {missing[0]} again; to join some only, name them one by one",
            )
