"""The commands in README and docs work; links point at something; files named exist."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.pool import REPOSITORY

DOCUMENTS = sorted(
    [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    + list((REPOSITORY / "docs").glob("*.md"))
    + list((REPOSITORY / "examples").glob("**/*.md"))
)
BLOCK = re.compile(r"(?:<!-- tested by (?P<test>\S+) -->\n)?```bash\n(?P<code>.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
TIMEOUT_S = 300


@dataclass(frozen=True)
class CommandBlock:
    """One ```bash block; `tested_by` names what covers a block that is not run here."""

    document: Path
    number: int
    code: str
    tested_by: str | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(REPOSITORY)}-{self.number}"


def command_blocks() -> list[CommandBlock]:
    return [
        CommandBlock(document, number, found["code"], found["test"])
        for document in DOCUMENTS
        for number, found in enumerate(BLOCK.finditer(document.read_text()), 1)
    ]


def checkout_in(directory: Path) -> Path:
    """Link the repository's files into `directory`, where commands may write."""
    for entry in REPOSITORY.iterdir():
        if entry.name not in {".git", ".venv", "quickstart", "runs"}:
            (directory / entry.name).symlink_to(entry)
    return directory


@pytest.mark.parametrize("block", [b for b in command_blocks() if b.tested_by is None], ids=str)
def test_command_block_runs(block, tmp_path):
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=checkout_in(tmp_path),
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{block.code}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("block", [b for b in command_blocks() if b.tested_by], ids=str)
def test_command_block_that_is_not_run_names_an_existing_test(block):
    assert (REPOSITORY / block.tested_by).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(REPOSITORY)))
def test_links_and_named_files_exist(document):
    text = document.read_text()
    missing = [
        target for target in LINK.findall(text) if not (document.parent / target).resolve().exists()
    ]
    # `tests/...`, `tools/...`, `megatron/...py` in backquotes are paths from the root.
    named = re.findall(
        r"`((?:tests|tools|megatron|megatron_lattice|examples|docs|benchmarks)/[\w./-]+)`", text
    )
    missing += [path for path in named if not (REPOSITORY / path).exists()]
    assert not missing


def test_every_page_is_in_the_list_of_pages_and_in_the_navigation():
    docs = REPOSITORY / "docs"
    pages = {page.name for page in docs.glob("*.md")} - {"README.md"}
    listed = set(LINK.findall((docs / "README.md").read_text()))
    navigation = set(re.findall(r": (\w+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M))
    assert pages <= listed
    assert pages == navigation - {"README.md"}


def test_make_targets_named_in_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)$", document.read_text(), re.M)
        for target in target
        if target
    }
    assert named <= targets
    assert shutil.which("make") is not None
