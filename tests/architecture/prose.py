"""Five habits of grammar that make prose hard to read, counted in docs, docstrings and comments.

    python -m tests.architecture.prose             # the table
    python -m tests.architecture.prose HABIT       # every place of one habit
    python -m tests.architecture.prose --check     # fail if there are more than `BOUND`

CONTRIBUTING.md has the rules: subject, verb, object; the noun is repeated.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.architecture.source import ROOT

BOUND = 20
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


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to print."""

    habit: tuple[str, ...] = positional(())
    """A habit, to list its places."""
    check: bool = False
    """Fail if there are more places than the bound allows."""


def main() -> int:
    """Print the table, or the places of a habit; compare with the bound."""
    flags = read_command_line(Flags, prog="python -m tests.architecture.prose", description=__doc__)
    habit = " ".join(flags.habit)
    if habit:
        if habit not in HABITS:
            print(f"no habit is called {habit!r}; there are: {', '.join(HABITS)}")
            return 2
        print("\n".join(places(habit)))
        return 0
    counts = {habit: len(places(habit)) for habit in HABITS}
    total = sum(counts.values())
    for habit, count in counts.items():
        print(f"{count:6,}  {habit}")
    print(f"{total:6,}  together, of at most {BOUND:,}")
    return int(flags.check and total > BOUND)


if __name__ == "__main__":
    sys.exit(main())
