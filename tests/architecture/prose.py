"""Five habits of grammar that make prose hard to read, counted in docs, docstrings and comments.

    python -m tests.architecture.prose             # the table
    python -m tests.architecture.prose HABIT       # every place of one habit
    python -m tests.architecture.prose --check     # fail if there are more than `BOUND`

`STYLE` in CONTRIBUTING.md has the rules: subject, verb, object; the noun is repeated.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.source import ROOT

BOUND = 2350
"""How many places there may be. The bound only falls."""
HABITS = {
    "that of": r"\b(?:that|those) (?:of|which|who|that)\b",
    "what is": r"\b(?:what|whoever|who) (?:is|are|was|were|has|have|it|they|he|no|one|the|a|each"
    r"|this|does|do|comes|goes|makes|takes|needs|holds|cannot|can|must)\b",
    "of which": r"\b(?:of|in|on|at|by|with|from|after|over) (?:which|whose|whom)\b",
    "agents that speak": r"\b(?:says?|said|tells?|told|asks?|asked|comes?|came|goes|went|go on"
    r"|meets?|met|stands?|stood|knows?|hears?|speaks?|lies|lets?)\b",
    "negative or circular": r"\b(?:None|0|False|Empty)(?::| is| means) (?:none|no |not |as many"
    r"|as it|nothing|the same)",
}
"""Habit -> regular expression."""
SPEAKERS = re.compile(
    r"\b(?:users?|people|person|you|we|they who|authors?|papers?|readers?|reviewers?)\b"
    r"|that is to say|met(?:er|ric|a)|let'?s\b",
    re.IGNORECASE,
)
"""A sentence of one of these may speak: people do."""
FOLDERS = ("megatron", "megatron_lattice", "tools", "examples", "docs", "benchmarks")
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "pretrain_gpt.py",
    "Makefile",
)
GENERATED = ("docs/flags.md",)
_CODE = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL)


def files() -> Iterator[Path]:
    """Yield the files whose prose is read."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".sh", ".yaml") and "__pycache__" not in path.parts:
                yield path
    yield from (ROOT / name for name in FILES)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text): of Python docstrings, comments and messages; else all but code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        blank = _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
        yield from enumerate(blank.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            value = re.sub(r"`[^`]*`", " ", node.value)
            yield from ((node.lineno + i, line) for i, line in enumerate(value.splitlines()))


@cache
def places(habit: str) -> list[str]:
    """Return each place of a habit: file, line, text."""
    pattern = re.compile(HABITS[habit])
    found = []
    for path in files():
        name = str(path.relative_to(ROOT))
        if name not in GENERATED:
            for number, line in prose(path):
                if pattern.search(line) and not SPEAKERS.search(line):
                    found.append(f"{name}:{number}: {line.strip()}")
    return found


def main() -> int:
    """Print the table, or the places of a habit; compare with the bound."""
    name = " ".join(sys.argv[1:])
    if name in HABITS:
        print("\n".join(places(name)))
        return 0
    total = sum(len(places(habit)) for habit in HABITS)
    for habit in HABITS:
        print(f"{len(places(habit)):6,}  {habit}")
    print(f"{total:6,}  together, of at most {BOUND:,}")
    return int(name == "--check" and total > BOUND)


if __name__ == "__main__":
    sys.exit(main())
