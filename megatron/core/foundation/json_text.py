"""JSON of files that may come from anybody."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any


def parse_json(
    text: str | bytes,
    *,
    object_pairs_hook: Callable[[Sequence[tuple[str, object]]], object] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested more deeply than the parser goes (a thousand levels or
            so), of which `json.loads` speaks by RecursionError.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
