"""JSON of untrusted files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.foundation.errors import DataError


def parse_json(
    text: str | bytes,
    *,
    object_pairs_hook: Callable[[Sequence[tuple[str, object]]], object] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply for the parser (about a thousand levels);
            `json.loads` raises RecursionError then.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str, kinds: type | tuple[type, ...], *flags: str) -> Any:
    """Return the JSON object (or list) in a file that `flags` name.

    Raises:
        DataError: the file is not JSON, or holds another type.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = parse_json(file.read())
        if not isinstance(found, kinds):
            raise ValueError(f"a {type(found).__name__} instead of an object")
    except ValueError as error:
        raise DataError(
            f"{path} is not valid JSON: {error}.",
            flags=flags,
            fix="correct the file, or copy it again",
        ) from error
    return found
