"""docs/security.md names tests that exist, and every document that needs it leads to it."""

import re

import pytest

from tests.harness.pool import REPOSITORY

PAGE = (REPOSITORY / "docs" / "security.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_named_test_exists(file, test):
    text = (REPOSITORY / file).read_text()
    assert not test or f"\ndef {test}(" in text


def test_each_finding_names_a_test():
    table = PAGE.split("## What was found, and the tests")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 18
    assert not [row for row in rows if "`tests/" not in row]


@pytest.mark.parametrize("document", ["README.md", "clusters.md", "generation.md"])
def test_the_page_is_linked(document):
    assert "(security.md" in (REPOSITORY / "docs" / document).read_text()
