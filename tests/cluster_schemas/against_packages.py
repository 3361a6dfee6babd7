"""Read every file in examples/cluster by the package that publishes its schema.

    make schemas

Also compare our schema check with the library jsonschema. This runs in .venv-schemas.
"""

import sys
from typing import Any

import jsonschema
import sky
from kubeflow_trainer_api import models
from sky.client.cli.command import jobs_launch

from tests.cluster_schemas.cases import CLUSTER, SCHEMA_OF, SCHEMAS, document_of, misspelt
from tests.harness.json_schema import problems


def main() -> int:
    """Check all files; return the exit status."""
    num_changed, wrong = 0, []
    for name, kind in SCHEMA_OF.items():
        document = document_of(name)
        schema = SCHEMAS["schemas"][kind]
        validator = jsonschema.Draft202012Validator(schema | {"$defs": SCHEMAS["$defs"]})
        read(name, document)
        for field, one in [("nothing", document), *misspelt(document)]:
            num_changed += field != "nothing"
            is_refused = bool(problems(one, schema, SCHEMAS["$defs"]))
            if is_refused == (field == "nothing") or is_refused == validator.is_valid(one):
                wrong.append(f"{name} with {field} misspelt: refused is {is_refused}")
    print(f"{len(SCHEMA_OF)} files, {num_changed} misspelt ones, {SCHEMAS['packages']}")
    print("\n".join(wrong) or "all fit, and jsonschema agrees")
    return bool(wrong)


def read(name: str, document: Any) -> None:
    """Read a document by the package's model, and the command in its comment by the CLI."""
    if name == "skypilot.yaml":
        task = sky.Task.from_yaml_config(dict(document))
        assert task.num_nodes == document["num_nodes"]
        words = ["--name", "llama3-8b", str(CLUSTER / name)]
        assert "sky jobs launch --name llama3-8b" in (CLUSTER / name).read_text()
        jobs_launch.make_context("launch", words)
        return
    model = {"trainjob.yaml": models.TrainerV1alpha1TrainJob,
             "jobset.yaml": models.JobsetV1alpha2JobSet}[name]  # fmt: skip
    assert model.from_dict(document).to_dict() == document


if __name__ == "__main__":
    sys.exit(main())
