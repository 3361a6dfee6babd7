"""Join results of `tools/gpu_session.py`, and write the GPU sections of the documents from them.

    python -m benchmarks.gpu.evidence join DIRECTORY    # A.json ... D.json of one or more sessions
    python -m benchmarks.gpu.evidence write             # renew the blocks in README and docs

`join` writes `benchmarks/results/gpu/DATE-CARD-COMMIT.json`, one file for each card and commit;
later calls add stages to it. A rehearsal is refused. `write` generates every sentence and table
about GPUs between the marks in README.md and docs/gpu.md from these files; a test compares them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.exit_status import tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
MOST_BYTES = 100_000
STAGES = ("A", "D", "B", "C")
BEGIN = "<!-- begin: written by python -m benchmarks.gpu.evidence write -->"
END = "<!-- end -->"
NOTHING = "**No line of this project has run on a GPU yet**, so there is no figure of speed on one."
MACHINE = ("python", "torch", "triton", "transformers", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")

Result = dict[str, Any]
"""One file: card, commit, date, machine, stages (stage -> checks), planner."""


def join(directory: Path, into: Path = RESULTS) -> list[Path]:
    """Write the stages below a directory to the file of their card and commit.

    Raises:
        DataError: there are no stages, a stage is a rehearsal, or a file would be too large.
    """
    stages = [json.loads(path.read_text("utf-8"))
              for name in STAGES for path in sorted(directory.rglob(f"{name}.json"))]  # fmt: skip
    if not stages:
        raise DataError(f"{directory} has no {', '.join(f'{s}.json' for s in STAGES)}")
    written = []
    for stage in sorted(stages, key=lambda s: str(s["began"])):
        if stage["rehearsal"] or not stage["gpus"]:
            raise DataError(f"stage {stage['stage']} of {stage['began']} ran without a GPU")
        card, commit = str(stage["gpus"][0]["name"]), str(stage["commit"])[:10]
        slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
        known = sorted(into.glob(f"20*-{slug}-{commit}.json"))
        path = known[0] if known else into / f"{str(stage['began'])[:10]}-{slug}-{commit}.json"
        result: Result = {
            "card": card, "commit": commit, "date": path.name[:10],
            "machine": {name: stage.get(name) for name in MACHINE}, "stages": {},
        }  # fmt: skip
        if known:
            result = json.loads(path.read_text("utf-8"))
        found = [check | {"rows": with_estimates(check["rows"])} for check in stage["checks"]]
        result["stages"][stage["stage"]] = found
        result["planner"] = _planner(result)
        text = json.dumps(result, indent=0) + "\n"
        if len(text) > MOST_BYTES:
            raise DataError(f"{path.name} would have {len(text)} bytes, more than {MOST_BYTES}")
        into.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return sorted(set(written))


def _planner(result: Result) -> list[dict[str, Any]]:
    """Return the planner's times before and after its calibration to the variants."""
    rows = rows_of(result, "variants")
    if not rows:
        return []
    from benchmarks.gpu.variants import calibrated, measured_runs
    from megatron_lattice.planner.step_command import gpu_of_card

    runs = measured_runs(rows)
    try:
        return list(calibrated(runs, gpu_of_card(result["card"]))) if runs else []
    except ConfigError as error:  # the planner has no constants for the card
        return [{"error": str(error)}]


def results(folder: Path = RESULTS) -> list[Result]:
    """Return the joined files, the newest first."""
    paths = sorted(folder.glob("20*.json"), reverse=True)
    return [json.loads(path.read_text("utf-8")) for path in paths]


def checks(result: Result) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (stage, check)."""
    for stage in STAGES:
        for check in result["stages"].get(stage, ()):
            yield stage, check


def rows_of(result: Result, *names: str, passed: bool = False) -> list[dict[str, Any]]:
    """Return the rows of some checks.

    Args:
        passed: select only checks with status 0.
    """
    return [
        row
        for _, check in checks(result)
        if check["check"] in names and (check["status"] == 0 or not passed)
        for row in check["rows"]
    ]


def with_estimates(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of variants with the estimates of their memory, and all other rows."""
    found = {row["estimate of"]: row["dry run GiB"] for row in rows if "estimate of" in row}
    return [
        row | ({"dry run GiB": found[row["variant"]]} if row.get("variant") in found else {})
        for row in rows
        if "estimate of" not in row
    ]


def estimate_of_step(result: Result, row: dict[str, Any]) -> dict[str, Any]:
    """Return the cell with the estimated memory of our step: it is the step of "base"."""
    bases = [each for each in rows_of(result, "variants") if each.get("variant") == "base"]
    is_known = row["step"] == "ours" and bases and row.get("dry run GiB") is None
    return {"dry run GiB": bases[-1].get("dry run GiB")} if is_known else {}


def cell(value: object) -> str:
    """Return a value as text for a table."""
    if isinstance(value, list):
        return " to ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|")


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table; no lines without rows."""
    if rows:
        yield from ("", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
        for row in rows:
            yield f"| {' | '.join(cell(row.get(name)) for name in columns)} |"


STEP = ("step", "ms", "tokens/s", "TFLOP/s", "MFU %", "predicted MFU %", "peak GiB", "dry run GiB")
VARIANT = ("variant", "ms", "tokens/s", "MFU %", "peak GiB", "dry run GiB", "error")
KERNEL = ("kernel", "by", "timed by", "ms", "% of a copy", "TFLOP/s", "both passes, ms",
          "both passes, % of a copy", "both passes, TFLOP/s", "error")  # fmt: skip


def summary(result: Result) -> Iterator[str]:
    """Yield the passed and failed checks on one card, and the speed of the step."""
    machine = ", ".join(f"{k} {v}" for k, v in result["machine"].items() if v)
    yield f"**{result['card']}**, commit `{result['commit']}`, {result['date']} ({machine}):"
    yield ""
    groups: dict[str, list[str]] = {"passed": [], "failed": [], "did not run": []}
    for stage, check in checks(result):
        status = check["status"]
        kind = "passed" if status == 0 else "did not run" if status == "no time" else "failed"
        why = f" ({status})" if kind == "failed" else ""
        groups[kind].append(f"{stage} {check['check']}{why}")
    for what, kinds in (("paths", ("paths",)), ("layouts", ("layouts",))):
        rows = [row for row in rows_of(result, *kinds) if "case" in row]
        groups[f"{what} that ran"] = [_case(row) for row in rows if row["ok"]]
        groups[f"{what} that failed"] = [_case(row) for row in rows if not row["ok"]]
    for kind, names in groups.items():
        if names:
            yield f"- {kind}: {'; '.join(names)}"
    rows = [row for name in ("ours", "plain", "ours again", "hf-liger", "megatron-core")
            for row in rows_of(result, name, passed=True) if "ms" in row]  # fmt: skip
    yield from table([row | estimate_of_step(result, row) for row in rows], STEP)


def _case(row: dict[str, Any]) -> str:
    details = [str(row[name]) for name in ("dtype", "backend") if name in row]
    return row["case"] + (f" ({', '.join(details)})" if details else "")


def details(result: Result) -> Iterator[str]:
    """Yield the tables of stage C below the summary."""
    yield from summary(result)
    shown: list[tuple[str, Sequence[str]]] = [
        ("family", ("family", "ms", "predicted ms", "launches", "predicted launches")),
        ("variant", VARIANT),
        ("kernel", KERNEL),
    ]
    for key, columns in shown:
        rows = rows_of(result, "profile", "variants", "kernels", passed=key != "variant")
        rows = [row for row in rows if next(iter(row)) == key and "not run" not in row]
        yield from table(rows, columns)
    plans = [row for row in result["planner"] if "plan of" in row]
    yield from table(plans, ("plan of", "ms", "planned ms", "after calibration ms"))


def block(found: Sequence[Result], lines: Callable[[Result], Iterable[str]]) -> str:
    """Return the text between the marks of a page."""
    return "\n\n".join("\n".join(lines(result)) for result in found) if found else NOTHING


PAGES: dict[str, Callable[[Result], Iterable[str]]] = {
    "README.md": summary,
    "docs/gpu.md": details,
}


def renewed(page: str, found: Sequence[Result], lines: Callable[[Result], Iterable[str]]) -> str:
    """Return a page with a new block.

    Raises:
        ValueError: the page has no block, or several.
    """
    parts = re.split(f"{re.escape(BEGIN)}.*?{re.escape(END)}", page, flags=re.DOTALL)
    if len(parts) != 2:
        raise ValueError(f"{len(parts) - 1} blocks between {BEGIN} and {END}, 1 is expected")
    return f"{BEGIN}\n{block(found, lines)}\n{END}".join(parts)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    command: str = positional(choices=("join", "write"))
    directories: tuple[Path, ...] = positional(metavar="DIRECTORY", default=())
    """Directory with the JSON files of the stages to join."""


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Join results or write pages."""
    prog = "python -m benchmarks.gpu.evidence"
    options = read_command_line(Flags, argv, prog=prog, description=__doc__)
    if options.command == "join":
        for directory in options.directories:
            print(*join(directory), sep="\n")
        return 0
    found = results()
    for name, lines in PAGES.items():
        path = ROOT / name
        path.write_text(renewed(path.read_text("utf-8"), found, lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
