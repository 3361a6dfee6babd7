"""The file that says why a run failed; no torch, because a watchdog writes it, too."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

FAILURE_FILE = "failure.json"


def write_failure(record: Mapping[str, object], directory: str) -> None:
    """Write failure.json, whole or not at all."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=directory, prefix=FAILURE_FILE)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    os.replace(path, Path(directory) / FAILURE_FILE)
