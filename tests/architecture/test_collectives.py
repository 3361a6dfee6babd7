"""The page of the docs that names the files with collectives is as the code is."""

import re

from tests.architecture.figures import files_with_collectives
from tests.architecture.source import ROOT


def test_the_docs_list_every_file_that_communicates_and_what_it_calls():
    text = (ROOT / "docs" / "collectives.md").read_text()
    listed = dict(re.findall(r"^\| `(megatron/\S+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert listed == dict(line.split(": ") for line in files_with_collectives())
