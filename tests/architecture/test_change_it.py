"""The diffs of docs/change_it.md fit the code: quick, and without a copy (see tests/change_it)."""

import importlib
import re
import subprocess

import pytest

from tests.change_it.page import MAX_LINES, REPOSITORY, read_changes

CHANGES = read_changes()
_IMPORT = re.compile(r"^\+from (megatron[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))$", re.MULTILINE)


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_is_a_short_diff_that_fits_the_code(title):
    diff = CHANGES[title].diff
    assert len(diff.splitlines()) <= MAX_LINES
    done = subprocess.run(
        ["git", "apply", "--check"], cwd=REPOSITORY, input=diff, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}\npython -m tests.change_it writes it anew"


@pytest.mark.parametrize("title", CHANGES)
def test_what_a_diff_imports_exists(title):
    diff = CHANGES[title].diff
    made = {
        path.removesuffix(".py").replace("/", ".") for path in re.findall(r"\+\+\+ b/(\S+)", diff)
    }
    for module, several, names in _IMPORT.findall(diff):
        if module not in made:
            found = importlib.import_module(module)
            for name in re.findall(r"\w+", several or names):
                assert hasattr(found, name), f"{module} has no {name}: change docs/change_it.md"
