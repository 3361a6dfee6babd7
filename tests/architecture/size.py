"""How much code there is, in how many pieces: `python -m tests.architecture size`."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import PACKAGES, ROOT, Function, imports, modules

SHORT_LINES = 5
"""A function of at most so many lines, with its signature, is short."""


def num_lines(*folders: str) -> int:
    """Count the lines of all Python files in `folders`."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sum(path.read_text().count("\n") for path in files)


def short_functions() -> tuple[int, int]:
    """Return (functions of at most `SHORT_LINES` lines, all functions), nested ones too."""
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, Function)
    ]
    return sum(length <= SHORT_LINES for length in lengths), len(lengths)


def import_lines() -> int:
    """Count the lines of import statements."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def single_importers() -> list[str]:
    """Return the modules that exactly one other module imports; packages are left out."""
    counts = Counter(target for targets in imports().values() for target in targets)
    return [
        name for name, module in modules().items() if counts[name] == 1 and not module.is_package
    ]


def readme_words() -> int:
    """Count the words of the README."""
    return len((ROOT / "README.md").read_text().split())


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    total = num_lines(*PACKAGES)
    short, functions = short_functions()
    for package in PACKAGES:
        yield f"{num_lines(package):9,}  lines of {package}/"
    yield f"{total:9,}  lines of both"
    yield f"{num_lines('tests'):9,}  lines of tests/"
    yield f"{short / functions:9.1%}  of {functions:,} functions have at most {SHORT_LINES} lines"
    yield f"{import_lines() / total:9.1%}  of the lines are imports"
    yield f"{len(single_importers()):9,}  of {len(modules()):,} modules have one importer"
    step = Path(ROOT / "megatron/training/run/step.py")
    yield f"{step.read_text().count(chr(10)):9,}  lines of {step.relative_to(ROOT)}"
    yield f"{readme_words():9,}  words of the README"
