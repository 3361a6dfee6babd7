"""Derive `schemas.json` from the packages that publish the schemas.

    make schemas

This runs in .venv-schemas, which has those packages. The file keeps names, types and required
fields; it leaves out descriptions and defaults. Unknown fields are errors, as they are for
`kubectl` with strict validation and for SkyPilot.
"""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kubeflow_trainer_api import models
from sky.utils import schemas

TARGET = Path(__file__).parent / "schemas.json"
PACKAGES = ("kubeflow-trainer-api", "skypilot")
QUANTITY = {"anyOf": [{"type": "string"}, {"type": "number"}]}
"""Quantity and IntOrString of Kubernetes."""
_NOTES = ("description", "title", "default", "$schema", "format")


def main() -> None:
    """Write the file."""
    definitions: dict[str, Any] = {}
    roots = {
        "TrainJob": of_pydantic("TrainerV1alpha1TrainJob", definitions),
        "JobSet": of_pydantic("JobsetV1alpha2JobSet", definitions),
        "SkyPilot": without_notes(schemas.get_task_schema()),
        "SkyPilotResources": without_notes(schemas.get_resources_schema()),
    }
    found = {
        "packages": {name: version(name) for name in PACKAGES},
        "schemas": roots,
        "$defs": dict(sorted(definitions.items())),
    }
    text = json.dumps(found, separators=(",", ":"))
    TARGET.write_text(re.sub(r'("\w+":\{"type":"object")', r"\n\1", text) + "\n")
    print(TARGET, found["packages"], f"{TARGET.stat().st_size} bytes")


def of_pydantic(name: str, definitions: dict[str, Any]) -> dict[str, str]:
    """Add a model of kubeflow-trainer-api and the models that it uses to `definitions`."""
    schema = getattr(models, name).model_json_schema(by_alias=True)
    for key, value in {**schema.pop("$defs"), name: schema}.items():
        if "actual_instance" in value["properties"]:
            definitions[key] = QUANTITY
        else:
            definitions[key] = strict(value)
    definitions[name]["properties"].pop("status")
    definitions[name]["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return {"$ref": f"#/$defs/{name}"}


def strict(schema: Any) -> Any:
    """Leave notes and nulls out, and refuse properties that are not named."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "anyOf" in schema:
        kept = [one for one in schema["anyOf"] if one != {"type": "null"}]
        if len(kept) == 1:
            return strict(kept[0])
    found = {
        key: {name: strict(one) for name, one in value.items()}
        if key == "properties"
        else strict(value)
        for key, value in schema.items()
        if key not in _NOTES
    }
    if "properties" in found:
        found["additionalProperties"] = False
    return found


def without_notes(schema: Any, is_names: bool = False) -> Any:
    """Leave out the keys that have no effect on validity."""
    if isinstance(schema, list):
        return [without_notes(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_notes(value, key in ("properties", "patternProperties"))
        for key, value in schema.items()
        if is_names or key not in _NOTES
    }


if __name__ == "__main__":
    main()
