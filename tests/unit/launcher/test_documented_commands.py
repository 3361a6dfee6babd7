"""The commands of docs/clusters.md that launch are run as they are written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from megatron.launcher.command import BACKENDS, main
from tests.harness.pool import REPOSITORY

PAGE = (REPOSITORY / "docs" / "clusters.md").read_text()
MARK = "<!-- tested by tests/unit/launcher/test_documented_commands.py -->\n```bash\n"
BLOCKS = [text.split("```")[0].replace("\\\n", " ") for text in PAGE.split(MARK)[1:]]


@pytest.mark.parametrize("block", BLOCKS, ids=range(1, len(BLOCKS) + 1))
def test_each_command_works(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    named = dict(re.findall(r"^(\w+)=(\S+)$", block, re.MULTILINE))
    for line in filter(None, map(str.strip, block.splitlines())):
        for name, value in named.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line)
        if words[0] == "lattice" and words[-1] == "--help":
            with pytest.raises(SystemExit, match="0"):
                main(words[1:])
        elif words[0] == "lattice":
            assert "--dry-run" in words, "nothing is submitted here"
            assert main(words[1:]) == 0, line
        else:
            command = ["bash", "-c", line.replace("python ", f"{sys.executable} ", 1)]
            subprocess.run(command, check=True, timeout=60, capture_output=True)
        assert capsys.readouterr().out or words[0] != "lattice"
    assert {path.name for path in tmp_path.iterdir()} <= {"examples", "hosts"}


def test_every_back_end_is_shown():
    lines = "\n".join(BLOCKS)
    shown = set(re.findall(r"lattice launch .*--backend (\w+).*--dry-run", lines))
    assert shown == set(BACKENDS)
