"""The packages do not grow without a line in the changelog that gives the reason."""

import re

from tests.architecture.size import num_lines
from tests.architecture.source import PACKAGES, ROOT


def test_the_packages_have_no_more_lines_than_the_changelog_allows():
    allowed = re.search(r"at most ([0-9,]+) lines", (ROOT / "CHANGELOG.md").read_text())
    assert allowed is not None
    assert num_lines(*PACKAGES) <= int(allowed[1].replace(",", "")), (
        "delete lines, or raise the number in CHANGELOG.md and add the reason"
    )
