"""The report of `benchmarks.gpu`: what its parts found, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

Row = dict[str, object]
"""One line of a table: cells by the names of their columns."""

REHEARSAL = "**This is a rehearsal without an accelerator: its figures mean nothing.**"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows with what has to be known to read them."""

    title: str
    rows: list[Row]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one part found.

    Attributes:
        failures: what went wrong in it, for people.
    """

    tables: list[Table] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _markdown_table(rows: list[Row]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(name)) for name in columns) + " |")
    return lines


def markdown(machine: Row, parts: dict[str, Found], *, is_rehearsal: bool) -> str:
    """Return the report; its first line says whether it is a rehearsal."""
    lines = [REHEARSAL, ""] if is_rehearsal else []
    lines += ["# Measured on this machine", "", *_markdown_table([machine])]
    failed = [f"- {part}: {text}" for part, found in parts.items() for text in found.failures]
    lines += ["", "## What failed", "", *(failed or ["Nothing."])]
    for part, found in parts.items():
        for table in found.tables:
            lines += ["", f"## {part}: {table.title}", ""]
            lines += [table.note, ""] if table.note else []
            lines += _markdown_table(table.rows) if table.rows else ["No rows."]
    return "\n".join(lines) + "\n"


def write(directory: Path, machine: Row, parts: dict[str, Found], *, is_rehearsal: bool) -> None:
    """Write report.md and report.json, each whole or not at all."""
    content = {
        "is_rehearsal": is_rehearsal,
        "machine": machine,
        "parts": {part: dataclasses.asdict(found) for part, found in parts.items()},
    }
    texts = {
        "report.md": markdown(machine, parts, is_rehearsal=is_rehearsal),
        "report.json": json.dumps(content, indent=1) + "\n",
    }
    for name, text in texts.items():
        partial = directory / f"{name}.{os.getpid()}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, directory / name)
