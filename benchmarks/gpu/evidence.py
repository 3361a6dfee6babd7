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
"""One file: card, commit, date, begin of its first stage, machine, stages (stage -> checks),
planner."""


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
            "card": card, "commit": commit, "date": path.name[:10], "began": stage["began"],
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
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob("20*.json")]
    return sorted(found, key=lambda result: str(result["began"]), reverse=True)


def by_card(found: Sequence[Result]) -> list[Result]:
    """Return one result for each card: the newest rows of each check and of each case.

    Args:
        found: the newest first. A row of a case or variant gets the commit that it ran at.
    """
    cards: dict[str, Result] = {}
    for result in reversed(found):
        card = cards.setdefault(result["card"], {"stages": {}, "planner": [], "commits": ()})
        commits = (*card["commits"], result["commit"])
        card |= {k: v for k, v in result.items() if k not in card or k in ("date", "machine")}
        card |= {"commits": commits, "planner": result["planner"] or card["planner"]}
        for stage, check in checks(result):
            known = {each["check"]: each for each in card["stages"].get(stage, ())}
            known[check["check"]] = _newest(known.get(check["check"]), check, result["commit"])
            card["stages"][stage] = [*known.values()]
    return [*cards.values()]


def _newest(old: dict[str, Any] | None, new: dict[str, Any], commit: str) -> dict[str, Any]:
    """Return a check with the newest row of each case or variant."""
    if new["status"] == "no time" and old is not None:
        return old
    rows = {}
    for check, at in ((old or {"rows": []}, {}), (new, {"commit": commit})):
        for row in check["rows"]:
            if name := row.get("case") or row.get("variant"):
                rows[name] = row | at
    if not rows:
        return new
    has_passed = all(row.get("ok") for row in rows.values())
    return new | {"rows": [*rows.values()], "status": 0 if has_passed else new["status"]}


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


def headline(result: Result) -> Iterator[str]:
    """Yield how many checks and cases passed on one card, and the speed of the step."""
    groups = outcomes(result)
    parts = []
    for what, bad in (("passed", "failed"), ("paths that ran", "paths that failed"),
                      ("layouts that ran", "layouts that failed")):  # fmt: skip
        good = len(groups.get(what, ()))
        parts.append(f"{good} of {good + len(groups.get(bad, ()))} {what.split()[0]}")
    text = ", ".join(parts).replace("passed", "checks")
    yield f"**{result['card']}**, {result['date']}: {text} passed; [GPUs](docs/gpu.md) names them."
    yield from step_table(result)


def outcomes(result: Result) -> dict[str, list[str]]:
    """Return kind -> names of the checks, paths and layouts that passed and failed."""
    groups: dict[str, list[str]] = {"passed": [], "failed": [], "did not run": []}
    for stage, check in checks(result):
        status = check["status"]
        kind = "passed" if status == 0 else "did not run" if status == "no time" else "failed"
        why = f" ({status})" if kind == "failed" else ""
        groups[kind].append(f"{stage} {check['check']}{why}")
    for what in ("paths", "layouts"):
        rows = [row for row in rows_of(result, what) if "case" in row]
        groups[f"{what} that ran"] = [_case(row) for row in rows if row["ok"]]
        groups[f"{what} that failed"] = [_case(row) for row in rows if not row["ok"]]
    return {kind: names for kind, names in groups.items() if names}


def summary(result: Result) -> Iterator[str]:
    """Yield the passed and failed checks on one card, and the speed of the step."""
    machine = ", ".join(f"{k} {v}" for k, v in result["machine"].items() if v)
    commits = ", ".join(f"`{commit}`" for commit in result["commits"])
    yield f"**{result['card']}**, {result['date']} ({machine}); newest results of {commits}:"
    yield ""
    yield from (f"- {kind}: {'; '.join(names)}" for kind, names in outcomes(result).items())
    yield from step_table(result)


def step_table(result: Result) -> Iterator[str]:
    """Yield the table of the steps of stage B."""
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
        rows = [row for row in rows if key != "kernel" or "by" in row]
        yield from table(rows, columns)
    plans = [row for row in result["planner"] if "plan of" in row]
    yield from table(plans, ("plan of", "ms", "planned ms", "after calibration ms"))


def block(found: Sequence[Result], lines: Callable[[Result], Iterable[str]]) -> str:
    """Return the text between the marks of a page."""
    cards = by_card(found)
    return "\n\n".join("\n".join(lines(card)) for card in cards) if cards else NOTHING


PAGES: dict[str, Callable[[Result], Iterable[str]]] = {
    "README.md": headline,
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
