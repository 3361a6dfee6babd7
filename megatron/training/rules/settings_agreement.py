"""Check that all ranks were launched with the same settings.

The check uses only the rendezvous store, before any process group exists: ranks with different
settings could not create the groups. Rank 0 publishes its settings, the other ranks compare theirs,
and all ranks wait for the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError, TopologyError
from megatron.training.config.run import RunConfig, all_flags, plain

MAY_DIFFER = ("local_rank", "dry_run", "memory_snapshot_path")
"""Fields that a launcher sets per rank, or that affect one process only."""

Settings = dict[str, Any]


def comparable(config: RunConfig, extra: Mapping[str, object] | None = None) -> Settings:
    """Return flag -> JSON-ready value of all settings that must be equal on all ranks."""
    table = all_flags()
    found = {table[n].flag: plain(v) for n, v in config.flat().items() if n not in MAY_DIFFER}
    return found | {f"--{n.replace('_', '-')}": _text(v) for n, v in (extra or {}).items()}


def _text(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def digest(settings: Settings) -> str:
    """Return a hash of the settings."""
    return hashlib.blake2b(
        json.dumps(settings, sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def agree_on_settings(
    store: object,
    rank: int,
    world_size: int,
    settings: Settings | MegatronError,
    *,
    timeout: timedelta,
) -> None:
    """Raise on every rank if the settings of any rank differ from rank 0's or are invalid.

    Args:
        store: a torch.distributed store that all ranks share, new for this run.
        settings: this rank's `comparable(...)`, or the error that its command line raised.
        timeout: how long ranks may take to start.
    Raises:
        the rank's own error, if its settings are invalid.
        ConfigError: settings differ; the error names flags, ranks and values.
        TopologyError: ranks are missing.
    """
    if world_size == 1:
        if isinstance(settings, MegatronError):
            raise settings
        return
    try:
        reports = _exchange(store, rank, world_size, settings, timeout)
    except RuntimeError as error:  # from the store, if its peers have ended or are late
        raise TopologyError(
            f"rank {rank} of {world_size} waited {timeout} for the other ranks to start.",
            rule="all ranks of the job start together",
            flags=["--distributed-timeout-minutes"],
            fix="check that every node runs torchrun with the same --nnodes and --rdzv-endpoint",
        ) from error
    if isinstance(settings, MegatronError):
        raise settings
    if reports:
        raise _error(reports)


def _exchange(
    store: Any, rank: int, world_size: int, settings: Settings | MegatronError, timeout: timedelta
) -> list[dict[str, Any]]:
    """Return the differences from rank 0, which returns last: its process may host the store."""
    mine = settings if isinstance(settings, dict) else {"error": settings.describe()}
    if rank == 0:
        store.set("settings/first", json.dumps(mine))
        store.set("settings/digest", digest(mine))
    store.wait(["settings/digest"], timeout)
    if store.get("settings/digest").decode() != digest(mine):
        place = store.add("settings/num_different", 1)
        first = json.loads(store.get("settings/first").decode())
        report = {"rank": rank, "differences": _differences(first, mine)}
        store.set(f"settings/different/{place}", json.dumps(report))
    if store.add("settings/num_arrived", 1) == world_size:
        store.set("settings/all_arrived", "1")
    store.wait(["settings/all_arrived"], timeout)
    num_different = store.add("settings/num_different", 0)
    reports = [
        json.loads(store.get(f"settings/different/{place}").decode())
        for place in range(1, num_different + 1)
    ]
    if store.add("settings/num_informed", 1) == world_size:
        store.set("settings/all_informed", "1")
    if rank == 0:
        store.wait(["settings/all_informed"], timeout)
    return reports


def _differences(first: Settings, mine: Settings) -> dict[str, tuple[Any, Any]]:
    """Return flag -> (value on rank 0, value on this rank)."""
    names = [n for n in {**first, **mine} if first.get(n) != mine.get(n)]
    return {n: (first.get(n), mine.get(n)) for n in names}


def _error(reports: list[dict[str, Any]]) -> ConfigError:
    by_difference: dict[tuple[str, str, str], list[int]] = {}
    for report in reports:
        for flag, (first, here) in report["differences"].items():
            key = (flag, json.dumps(first), json.dumps(here))
            by_difference.setdefault(key, []).append(report["rank"])
    failed = sorted(r["rank"] for r in reports if "error" in r["differences"])
    if failed:
        text = next(
            json.loads(here) or json.loads(first)
            for flag, first, here in by_difference
            if flag == "error"
        )
        where = _ranks(failed) if len(failed) == len(reports) else "some ranks"
        return ConfigError(
            f"the command line of {where} is invalid, but valid on other ranks:\n{text}",
            rule="all ranks are launched with the same flags",
            fix="start every node with the same command line",
        )
    lines = [
        f"{flag}: {_ranks(sorted(ranks))} {here}, rank 0 {first}"
        for (flag, first, here), ranks in sorted(by_difference.items())
    ]
    flags = sorted({flag for flag, _, _ in by_difference})
    return ConfigError(
        "ranks were launched with different flags.\n  " + "\n  ".join(lines),
        rule="all ranks are launched with the same flags",
        flags=flags,
        fix="start every node with the same command line",
    )


def _ranks(ranks: list[int]) -> str:
    """Return "rank 3", or "ranks 1, 2, 5 and 12 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
