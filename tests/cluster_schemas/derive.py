"""Derive `schemas.json` from the packages that publish the schemas.

    make schemas

Runs with the Python of .venv-schemas, in which those packages are. What is kept are names, types,
and what is required; descriptions and defaults are left out. A field that the schema does not know
is an error, as it is for `kubectl` with strict validation and for SkyPilot.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "schemas.json"
PACKAGES = ("kubeflow-trainer-api", "kubeflow-training", "kubernetes", "ray", "skypilot")
QUANTITY = {"anyOf": [{"type": "string"}, {"type": "number"}]}
"""What Kubernetes calls Quantity and IntOrString."""
_NOTES = ("description", "title", "default", "$schema", "format")


def main() -> None:
    """Write the file, and say of what."""
    definitions: dict[str, Any] = {}
    roots = {
        "TrainJob": of_pydantic("TrainerV1alpha1TrainJob", definitions),
        "JobSet": of_pydantic("JobsetV1alpha2JobSet", definitions),
        "PyTorchJob": of_openapi("KubeflowOrgV1PyTorchJob", definitions),
        "SkyPilot": of_skypilot(),
        "SkyPilotResources": of_skypilot_resources(),
        "RayJob": of_ray(),
    }
    for root in ("TrainJob", "JobSet", "PyTorchJob"):
        definitions[roots[root]["$ref"].rpartition("/")[2]]["required"] = [
            "apiVersion", "kind", "metadata", "spec",
        ]  # fmt: skip
    found = {
        "packages": {name: version(name) for name in PACKAGES},
        "schemas": roots,
        "$defs": dict(sorted(definitions.items())),
    }
    text = json.dumps(found, indent=None, separators=(",", ":"), sort_keys=False)
    TARGET.write_text(re.sub(r'("\w+":\{"type":"object")', r"\n\1", text) + "\n")
    print(TARGET, found["packages"], f"{TARGET.stat().st_size} bytes")


# Kubeflow Trainer and JobSet: pydantic -----------------------------------------------------------


def of_pydantic(name: str, definitions: dict[str, Any]) -> dict[str, str]:
    """Add a model of kubeflow-trainer-api, and those that it uses."""
    from kubeflow_trainer_api import models

    schema = getattr(models, name).model_json_schema(by_alias=True)
    for key, value in {**schema.pop("$defs"), name: schema}.items():
        if "actual_instance" in value["properties"]:
            definitions[key] = QUANTITY
        else:
            definitions[key] = strict(value)
    definitions[name]["properties"].pop("status")
    return {"$ref": f"#/$defs/{name}"}


def strict(schema: Any) -> Any:
    """Leave notes and nulls out, and allow no property that is not named."""
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


# Kubeflow Training Operator: the attributes of generated classes ---------------------------------


def of_openapi(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Add a class of kubeflow-training or of the Kubernetes client, and those that it uses."""
    from kubeflow.training import models

    if name in definitions:
        return {"$ref": f"#/$defs/{name}"}
    kind = getattr(models, name, None)
    if kind is None:  # of a newer Kubernetes than the client that this package asks for
        return {"type": "object"}
    definitions[name] = {}
    properties, required = {}, []
    for attribute, text in kind.openapi_types.items():
        alias = kind.attribute_map[attribute]
        if alias != "status":
            properties[alias] = of_type(text, definitions)
            setter = inspect.getsource(getattr(kind, attribute).fset)
            if "must not be `None`" in setter:
                required.append(alias)
    definitions[name] = {
        "type": "object", "properties": properties, "additionalProperties": False,
        **({"required": required} if required else {}),
    }  # fmt: skip
    return {"$ref": f"#/$defs/{name}"}


def of_type(text: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type as these classes write it."""
    if found := re.fullmatch(r"list\[(.+)\]", text):
        return {"type": "array", "items": of_type(found[1], definitions)}
    if found := re.fullmatch(r"dict\((?:str, ?)(.+)\)", text):
        return {"type": "object", "additionalProperties": of_type(found[1], definitions)}
    plain = {"str": "string", "int": "integer", "float": "number", "bool": "boolean",
             "datetime": "string"}  # fmt: skip
    if text in plain:
        return {"type": plain[text]}
    return QUANTITY if text == "object" else of_openapi(text, definitions)


# SkyPilot: a JSON schema; Ray: a dataclass -------------------------------------------------------


def of_skypilot() -> Any:
    """Return the schema of a task."""
    from sky.utils import schemas

    return without_notes(schemas.get_task_schema())


def of_skypilot_resources() -> Any:
    """Return the schema of the resources of a task."""
    from sky.utils import schemas

    return without_notes(schemas.get_resources_schema())


def without_notes(schema: Any, is_names: bool = False) -> Any:
    """Leave out what says nothing of validity."""
    if isinstance(schema, list):
        return [without_notes(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_notes(value, key in ("properties", "patternProperties"))
        for key, value in schema.items()
        if is_names or key not in _NOTES
    }


def of_ray() -> dict[str, Any]:
    """Return the schema of a job that is submitted to Ray."""
    from ray.dashboard.modules.job.common import JobSubmitRequest

    hints = typing.get_type_hints(JobSubmitRequest)
    properties, required = {}, []
    for field in dataclasses.fields(JobSubmitRequest):
        properties[field.name] = of_hint(hints[field.name])
        if field.default is dataclasses.MISSING:
            required.append(field.name)
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def of_hint(hint: Any) -> dict[str, Any]:
    """Return the schema of a type of Python."""
    plain = {str: "string", int: "integer", float: "number", bool: "boolean"}
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    if hint in plain:
        return {"type": plain[hint]}
    if hint is Any:
        return {}
    if typing.get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": of_hint(arguments[1])}
    found = [of_hint(one) for one in arguments]
    return found[0] if len(found) == 1 else {"anyOf": found}


if __name__ == "__main__":
    main()
