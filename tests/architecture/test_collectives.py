"""The page of the docs that names the files with collectives is as the code is."""

from __future__ import annotations

import re

from tests.architecture.figures import files_with_collectives
from tests.architecture.source import ROOT, imports


def test_the_docs_list_every_file_that_communicates_and_what_it_calls():
    text = (ROOT / "docs" / "collectives.md").read_text()
    listed = dict(re.findall(r"^\| `(megatron/\S+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert listed == dict(line.split(": ") for line in files_with_collectives())


def test_only_the_transport_knows_shared_memory():
    shm = "megatron.core.transport.shm"
    users = {
        user
        for user, targets in imports().items()
        if any(target.startswith(shm) for target in targets)
    }
    assert {user for user in users if not user.startswith("megatron.core.transport")} == set()
