"""Descriptions of jobs that use every field, and the documents that back ends make of them."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron.launcher.command import BACKENDS, read_launch
from megatron.launcher.plan import LaunchPlan

SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())
SCHEMA_OF = {
    "trainjob": "TrainJob", "pytorchjob": "PyTorchJob", "jobset": "JobSet", "ray": "RayJob",
    "sky": "SkyPilot",
}  # fmt: skip
IMAGE = "--image registry.example.com/lattice@sha256:" + 64 * "0"
COMMON = (
    "--nodes 1 --gpus-per-node 8",
    "--nodes 4 --gpus-per-node 0 --processes-per-node 2 --env A=1 --env 'B=two words'",
    "--nodes 2 --check --time-limit 2-00:00:00 --cpus-per-node 64 --memory-per-node-gib 512",
)
OF_KUBERNETES = (
    "--mount data:/data:ro --mount /scratch:/scratch --rdma-resource rdma/hca_shared_devices_a=8",
    "--queue user-queue --node-selector cloud=a --namespace train --setup 'echo a; echo \"b\"'",
)
CASES = {
    "trainjob": [f"{IMAGE} {flags}" for flags in (*COMMON, *OF_KUBERNETES, "--runtime other")],
    "pytorchjob": [f"{IMAGE} {flags}" for flags in (*COMMON, *OF_KUBERNETES, "--host-network")],
    "jobset": [f"{IMAGE} {flags}" for flags in (*COMMON, *OF_KUBERNETES, "--host-network")],
    "ray": [*COMMON, f"{IMAGE} --mount /data:/data:ro", "--directory runs/ray"],
    "sky": [*COMMON, f"{IMAGE} --mount data:/data", "--infra gcp/us-central1 --accelerator A100"],
}
"""Back end -> flags."""


def plan_of(backend: str, flags: str) -> LaunchPlan:
    """Return what a back end makes of flags."""
    command = ["--", "pretrain_gpt.py", "--save", "/runs/it's", "--exit-signal-handler"]
    job = read_launch(["--backend", backend, *shlex.split(flags), *command]).job
    return BACKENDS[backend](job)


def document_of(backend: str, plan: LaunchPlan) -> Any:
    """Return the document that the schema of a back end describes.

    Ray is given a command and a file: together they are what its server is sent.
    """
    document = yaml.safe_load(plan.files[0].text)
    if backend != "ray":
        return document
    (words,) = plan.commands
    return {"entrypoint": shlex.join(words[words.index("--") + 1 :]), "runtime_env": document}


def misspelt(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies in which one name is misspelt; names that users choose are left out."""
    for path in _paths(document):
        changed = copy.deepcopy(document)
        place = changed
        for step in path[:-1]:
            place = place[step]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        yield ".".join(map(str, path)), changed


FREE = ("nodeSelector", "labels", "requests", "limits", "envs", "volumes", "runtime_env",
        "pytorchReplicaSpecs", "resources")  # fmt: skip
"""Mappings whose keys are not fields; SkyPilot checks resources by a schema of their own."""


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        is_free = bool(path) and path[-1] in FREE and "requests" not in value
        for key, inner in value.items():
            if not is_free:
                yield (*path, key)
            if not is_free or path[-1] == "pytorchReplicaSpecs":
                yield from _paths(inner, (*path, key))
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*path, number))
