"""Let the packages that publish the schemas read every file, beside our own check.

    make schemas

Runs with the Python of .venv-schemas, which has no torch.
"""

from __future__ import annotations

import sys
from typing import Any

import jsonschema
import yaml

from tests.cluster_schemas.cases import (
    CASES,
    SCHEMA_OF,
    SCHEMAS,
    document_of,
    misspelt,
    plan_of,
)
from tests.harness.json_schema import problems


def main() -> int:
    """Check all; return the exit status."""
    num_files = num_changed = 0
    wrong = []
    for backend, all_flags in CASES.items():
        for flags in all_flags:
            plan = plan_of(backend, flags)
            document = document_of(backend, plan)
            try:
                READERS[backend](document, plan.files[0].text, plan.commands[0])
            except Exception as error:  # whatever the package raises
                wrong.append(f"{backend} {flags}: {type(error).__name__}: {error}")
            num_files += 1
            for name, one in [("as it is", document), *misspelt(document)]:
                num_changed += name != "as it is"
                if library_refuses(one, backend) is not bool(ours(one, backend)):
                    wrong.append(f"{backend} {flags}: jsonschema differs on {name}")
    print(f"{num_files} files, {num_changed} misspelt ones, {SCHEMAS['packages']}")
    print("\n".join(wrong) or "all fit, and jsonschema agrees")
    return bool(wrong)


def ours(document: Any, backend: str) -> list[str]:
    """Return what our own check finds."""
    return problems(document, SCHEMAS["schemas"][SCHEMA_OF[backend]], SCHEMAS["$defs"])


def library_refuses(document: Any, backend: str) -> bool:
    """Return whether jsonschema refuses a document."""
    schema = SCHEMAS["schemas"][SCHEMA_OF[backend]] | {"$defs": SCHEMAS["$defs"]}
    return bool(list(jsonschema.Draft202012Validator(schema).iter_errors(document)))


def read_train_job(document: Any, _text: str, _words: Any) -> None:
    """Read by Kubeflow Trainer's model."""
    from kubeflow_trainer_api import models

    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document


def read_job_set(document: Any, _text: str, _words: Any) -> None:
    """Read by JobSet's model."""
    from kubeflow_trainer_api import models

    assert models.JobsetV1alpha2JobSet.from_dict(document).to_dict() == document


def read_pytorch_job(_document: Any, text: str, _words: Any) -> None:
    """Read by the Training Operator's client."""
    import json
    from types import SimpleNamespace

    from kubeflow.training import models
    from kubernetes.client import ApiClient

    client = ApiClient()
    for name in dir(models):  # the client looks for classes among its own
        import kubernetes.client.models

        if name.startswith("KubeflowOrg"):
            setattr(kubernetes.client.models, name, getattr(models, name))
    document = yaml.safe_load(text)
    response = SimpleNamespace(data=json.dumps(document))
    job = client.deserialize(response, "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(job) == document


def read_ray(document: Any, _text: str, words: Any) -> None:
    """Read by Ray's request, its runtime environment and its command line."""
    import os
    import tempfile

    from ray.dashboard.modules.job.cli import submit
    from ray.dashboard.modules.job.common import JobSubmitRequest
    from ray.runtime_env import RuntimeEnv

    JobSubmitRequest(**document)
    runtime = dict(document["runtime_env"])
    runtime.pop("working_dir", None)  # a local directory is uploaded by the client
    RuntimeEnv(**runtime)
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.makedirs(os.path.dirname(words[4]))
        with open(words[4], "w") as file:
            file.write("{}")
        context = submit.make_context("submit", list(words[3:]))
        os.chdir(here)
    assert list(context.params["entrypoint"])[:2] == ["python", "-m"]


def read_sky(document: Any, text: str, words: Any) -> None:
    """Read by SkyPilot's task and its command line."""
    import sky
    from sky.client.cli.command import jobs_launch

    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    assert task.num_nodes == document["num_nodes"]
    jobs_launch.make_context("launch", list(words[3:]))


READERS = {
    "trainjob": read_train_job, "jobset": read_job_set, "pytorchjob": read_pytorch_job,
    "ray": read_ray, "sky": read_sky,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
