"""Check a document against a JSON schema: the keywords that the schemas of the tests use.

A keyword that is not implemented is an error, so that nothing is passed over. `make schemas`
compares the verdicts with those of the library jsonschema.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,),
    "null": (type(None),), "integer": (int,), "number": (int, float),
}  # fmt: skip
_KEYWORDS = {
    "$ref", "type", "properties", "patternProperties", "additionalProperties", "required", "items",
    "anyOf", "oneOf", "not", "enum", "case_insensitive_enum", "const", "pattern", "minimum",
    "maximum", "exclusiveMinimum", "minLength", "maxLength", "minItems", "maxItems",
    "minProperties", "maxProperties", "uniqueItems",
}  # fmt: skip


def problems(document: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """Return what a schema does not allow, each with its place.

    Args:
        definitions: what `#/$defs/NAME` refers to.
    """
    return list(_problems(document, schema, definitions, "document"))


def _problems(
    value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str
) -> Iterator[str]:
    unknown = set(schema) - _KEYWORDS
    assert not unknown, f"keywords {unknown} at {place}"
    if "$ref" in schema:
        yield from _problems(
            value, definitions[schema["$ref"].removeprefix("#/$defs/")], definitions, place
        )
    if "type" in schema and not _is_of_type(value, schema["type"]):
        yield f"{place} is {value!r:.60}, no {schema['type']}"
        return
    yield from _of_value(value, schema, place)
    fits = {
        name: [not list(_problems(value, one, definitions, place)) for one in schema[name]]
        for name in ("anyOf", "oneOf")
        if name in schema
    }
    if not any(fits.get("anyOf", [True])):
        yield f"{place} fits none of anyOf"
    if sum(fits.get("oneOf", [True])) != 1:
        yield f"{place} fits {sum(fits['oneOf'])} of oneOf"
    if "not" in schema and not list(_problems(value, schema["not"], definitions, place)):
        yield f"{place} fits what it must not"
    if isinstance(value, dict):
        yield from _of_object(value, schema, definitions, place)
    if isinstance(value, list) and "items" in schema:
        for number, one in enumerate(value):
            yield from _problems(one, schema["items"], definitions, f"{place}[{number}]")


def _is_of_type(value: Any, names: str | list[str]) -> bool:
    wanted = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in wanted
    return any(isinstance(value, _TYPES[name]) for name in wanted)


def _of_value(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} is {value!r:.60}, not one of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{place} is {value!r:.60}, not {schema['const']!r}"
    if "case_insensitive_enum" in schema:
        allowed = [one.lower() for one in schema["case_insensitive_enum"]]
        if not isinstance(value, str) or value.lower() not in allowed:
            yield f"{place} is {value!r:.60}, not one of {allowed}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{place} is {value!r:.60}, not of the pattern {schema['pattern']}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_low = value < schema.get("minimum", value)
        is_low = is_low or value <= schema.get("exclusiveMinimum", value - 1)
        if is_low or value > schema.get("maximum", value):
            yield f"{place} is {value}, out of its range"
    for kind, name in ((str, "Length"), (list, "Items"), (dict, "Properties")):
        if isinstance(value, kind):
            least, most = schema.get(f"min{name}", 0), schema.get(f"max{name}", len(value))
            if not least <= len(value) <= most:
                yield f"{place} has {len(value)} of {least} to {most}"
    if isinstance(value, list) and schema.get("uniqueItems"):
        repeated = [one for number, one in enumerate(value) if one in value[:number]]
        if repeated:
            yield f"{place} repeats an item"


def _of_object(
    value: dict[str, Any], schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str
) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place} lacks {name}"
    others = schema.get("additionalProperties", True)
    for name, inner in value.items():
        where = f"{place}.{name}"
        known = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        known += [s for p, s in schema.get("patternProperties", {}).items() if re.search(p, name)]
        for one in known:
            yield from _problems(inner, one, definitions, where)
        if not known and others is False:
            yield f"{where} is not known"
        elif not known and others is not True:
            yield from _problems(inner, others, definitions, where)
