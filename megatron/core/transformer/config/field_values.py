"""The values that a field may have, whatever the other fields are: a range, or some words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import default_of, kebab, metadata_of

POSITIVE = "it is a positive number"
NOT_NEGATIVE = "it is not negative"
BELOW_ONE = "it is in [0, 1)"
SHARE = "it is in [0, 1]"
_RANGES: dict[str, Callable[[float], bool]] = {
    POSITIVE: lambda value: 0 < value < math.inf,
    NOT_NEGATIVE: lambda value: 0 <= value < math.inf,
    BELOW_ONE: lambda value: 0 <= value < 1,
    SHARE: lambda value: 0 <= value <= 1,
}
"""Rule, as a field names it with `flag(..., within=POSITIVE)` -> its test.

Sizes that may be derived from other sizes, as the heads of Mamba-2, are checked with their layers.
"""


def value_problems(config: Any) -> Iterator[MegatronError]:
    """Yield the fields of a new config, before any are derived, whose value is out of range or is
    not one of the flag's choices."""
    for field in fields(config):
        metadata, value, name = metadata_of(field), getattr(config, field.name), field.name
        spelling = (metadata.spellings or (kebab(metadata.name or name),))[0]
        if metadata.within and isinstance(value, (int, float)):
            fits, default = _RANGES[metadata.within], default_of(field)
            if fits(value):
                continue
            fix = f"leave {spelling} out" if default is None else f"use {spelling} {default}"
            if default is not None and not isinstance(default, list) and not fits(default):
                fix = f"set {spelling}"  # it has no default
            yield ConfigError(f"{name}={value}.", rule=metadata.within, flags=[spelling], fix=fix)
        elif isinstance(value, str) and metadata.choices and not metadata.values:
            refused = metadata.refuse_values
            choices = [str(choice) for choice in metadata.choices if choice not in refused]
            if value not in choices:
                yield ConfigError(
                    f"{name}={value!r} is unknown.",
                    rule=f"known are {', '.join(choices)}",
                    flags=[spelling],
                    fix=refused.get(value) or f"use {spelling} {choices[-1]}",
                )
