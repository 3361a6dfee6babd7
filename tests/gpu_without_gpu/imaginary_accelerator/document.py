"""What was seen of ranks, in lines and as tables."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.gpu_without_gpu.imaginary_accelerator.runs import LargeRun

GIB = 2**30
KINDS = ("weights", "gradients", "optimizer", "activations", "communication", "temporary")
AXES = {"tp": "tp", "cp": "cp", "pp": "pp", "ep": "ep", "dp_cp": "dp", "expt_dp": "expert dp"}
"""Group of ranks -> its column."""
LEAST_GIB = 0.05
"""Less is not in the tables."""


def report(rank: int, seen: dict[str, Any], *, with_capture: bool = False) -> list[str]:
    """Return lines on one rank."""
    kinds = ", ".join(f"{kind} {n / GIB:.2f}" for kind, n in seen["kinds"].items())
    traffic = ", ".join(f"{key} {n / GIB:.2f}" for key, n in seen["traffic"].items())
    waits = ", ".join(f"{place} x{n}" for place, n in seen["waits"].items()) or "none"
    lines = [
        f"  rank {rank}, {seen['seconds']} s of a processor:"
        f" peak {seen['peak'] / GIB:.2f} GiB in {seen['when']} ({kinds})",
        f"    exchanged GiB: {traffic}",
        f"    waits: {waits}",
    ]
    return [*lines, *_capture(seen)] if with_capture else lines


def _capture(seen: dict[str, Any]) -> list[str]:
    """Return what prevents the capture of a step, by reason."""
    by_reason: dict[str, list[str]] = {}
    for place, why, count in sorted(seen["obstacles"]):
        by_reason.setdefault(why, []).append(f"      {place} x{count}")
    lines = [line for why, places in by_reason.items() for line in (f"    {why}:", *places)]
    if not lines:
        return ["    nothing that was seen prevents the capture of a CUDA graph"]
    return ["    prevents the capture of a CUDA graph:", *lines]


def document(runs: Sequence[LargeRun], known: Mapping[tuple[Any, ...], Any]) -> list[str]:
    """Return the table of all ranks that are known, GiB; equal ones of a run are one row.

    Args:
        known: (words, ranks, rank) -> what `seen_of` returned.
    """
    head = ["model", "ranks", "layout", "sequence", "micro batches", "rank", "s", "waits", "peak"]
    head += [*KINDS, "exchanged"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for run in runs:
        place = [run.name, f"{run.num_ranks:,}", run.layout, f"{run.seq_length:,}"]
        place.append(str(run.num_microbatches))
        rows: dict[tuple[str, ...], dict[int, float]] = {}
        for rank in run.ranks:
            seen = known.get((run.words, run.num_ranks, rank))
            if seen is not None:
                rows.setdefault(tuple(_figures(seen)), {})[rank] = seen["seconds"]
        for figures, seconds in rows.items():
            ranks = "; ".join(f"{rank:,}" for rank in seconds)
            cells = [*place, ranks, f"{max(seconds.values()):.0f}", *figures]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(seen: dict[str, Any]) -> list[str]:
    traffic: Counter[str] = Counter()
    for key, num_bytes in seen["traffic"].items():
        group, _, _ = key.rpartition(" ")
        traffic[AXES.get(group, group)] += num_bytes
    moved = [f"{axis} {n / GIB:.1f}" for axis, n in traffic.items() if n / GIB >= LEAST_GIB]
    sizes = [f"{seen['kinds'].get(kind, 0) / GIB:.1f}" for kind in KINDS]
    waits = str(sum(seen["waits"].values()))
    return [waits, f"{seen['peak'] / GIB:.1f}", *sizes, ", ".join(sorted(moved))]
