"""Read docs/change_it.md, apply its diffs to copies of the package, and write them anew."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "change_it.md"
MAX_LINES = 40
_SECTION = re.compile(r"^## (A new .+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Change:
    """One section of the page."""

    title: str
    diff: str
    commands: list[list[str]]
    """Words of each command, with `$SMALL` filled in."""


def read_changes() -> dict[str, Change]:
    """Return the changes of the page by title."""
    text = PAGE.read_text()
    small = shlex.split(re.search(r'^SMALL="(.*?)"$', text, re.M | re.DOTALL)[1])
    parts = _SECTION.split(text)[1:]
    changes = {}
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        blocks = dict(_BLOCK.findall(body))
        lines = blocks["bash"].replace("\\\n", " ").splitlines()
        commands = [
            [part for word in shlex.split(line) for part in (small if word == "$SMALL" else [word])]
            for line in lines
        ]
        changes[title] = Change(title, blocks["diff"], commands)
    return changes


def copy_tree(directory: Path, original: Path = REPOSITORY) -> None:
    """Copy what the commands need; files are links, which `git apply` replaces."""
    # A new line of the same length in the same second would be taken for the compiled one.
    compiled = None if original != REPOSITORY else shutil.ignore_patterns("__pycache__")
    for name in ("megatron", "tools"):
        shutil.copytree(original / name, directory / name, copy_function=_link, ignore=compiled)
    shutil.copy(original / "pretrain_gpt.py", directory)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def apply(diff: str, directory: Path) -> None:
    """Apply a diff of the page to a copy.

    Raises:
        AssertionError: it does not fit the code any more; says what to do.
    """
    done = _git("apply", "--whitespace=error", directory=directory, text=diff)
    assert done.returncode == 0, (
        f"{done.stderr}\nthis diff of {PAGE.relative_to(REPOSITORY)} does not fit the code any"
        " more: `python -m tests.change_it` writes those anew whose lines have only moved"
    )


def _git(*words: str, directory: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.parent)}
    return subprocess.run(
        ["git", *words], cwd=directory, input=text, capture_output=True, text=True,
        env=environment, check=False,
    )  # fmt: skip


def regenerate(directory: Path, tell: Callable[[str], None]) -> bool:
    """Write the diffs of the page anew; return whether all could be applied.

    Context that has moved or changed a little is found by `patch`. What it cannot place must be
    edited by hand.
    """
    text, is_complete = PAGE.read_text(), True
    for number, change in enumerate(read_changes().values()):
        before, after = (directory / str(number) / side for side in "ab")
        for side in (before, after):
            copy_tree(side)
        for path in re.findall(r"^--- a/(.+)$", change.diff, re.MULTILINE):
            (after / path).unlink(missing_ok=True)  # `patch` would write into the linked file
            shutil.copy(REPOSITORY / path, after / path)
        done = subprocess.run(
            ["patch", "-p1", "--fuzz=3", "--no-backup-if-mismatch"], cwd=after, text=True,
            input=change.diff, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            is_complete = False
            tell(f"{change.title}: edit it by hand\n{done.stdout}")
            continue
        found = _git("diff", "--no-index", "-U1", "a", "b", directory=directory / str(number))
        fresh = _as_on_page(found.stdout)
        if fresh != change.diff:
            tell(f"{change.title}: written anew")
            text = text.replace(change.diff, fresh)
    PAGE.write_text(text)
    return is_complete


def _as_on_page(diff: str) -> str:
    """Leave out what `git apply` does not need."""
    kept = []
    for line in diff.replace("a/a/", "a/").replace("b/b/", "b/").splitlines(keepends=True):
        if line.startswith(("diff --git", "index ", "new file mode")):
            continue
        kept.append(re.sub(r"^(@@ .* @@).*", r"\1", line) if line.startswith("@@") else line)
    return "".join(kept)
