"""Directories without the cost of a real disk: thousands of fsyncs are made here."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """An empty directory in memory where the system has such a file system."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="checkpoint-test-", dir=memory))
    yield path
    shutil.rmtree(path)
