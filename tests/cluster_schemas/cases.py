"""The documents in examples/cluster, the schemas they must fit, and misspelt copies of them."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.harness.pool import REPOSITORY

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())
CLUSTER = REPOSITORY / "examples" / "cluster"
SCHEMA_OF = {"trainjob.yaml": "TrainJob", "jobset.yaml": "JobSet", "skypilot.yaml": "SkyPilot"}
FREE = ("nodeSelector", "labels", "requests", "limits", "envs", "volumes", "resources")
"""Mappings whose keys are not fields. SkyPilot checks `resources` by a separate schema."""


def document_of(name: str) -> Any:
    """Return the content of a file in examples/cluster."""
    return yaml.safe_load((CLUSTER / name).read_text())


def misspelt(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield a copy for each field whose name is misspelt. Names that users choose are left out."""
    for path in _paths(document):
        changed = copy.deepcopy(document)
        place = changed
        for step in path[:-1]:
            place = place[step]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        yield ".".join(map(str, path)), changed


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        is_free = bool(path) and path[-1] in FREE and "requests" not in value
        for key, inner in value.items() if not is_free else ():
            yield (*path, key)
            yield from _paths(inner, (*path, key))
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*path, number))
