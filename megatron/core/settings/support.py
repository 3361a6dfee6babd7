"""What becomes of settings that nothing reads: refused, or accepted with a warning that says why.

It is for code that builds configs itself. What the command line is given is answered by
`megatron.training.rules.support`, from the same tables.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flag_rows import table_fields
from megatron.core.settings.flags import FlagMetadata

_OF_A_DATACLASS = ("__post_init__", "__init__")


def _given(config: object) -> Iterator[tuple[str, FlagMetadata]]:
    """Yield what of the tables was given, as text, and what its table says of it.

    None is no value: code that passes on what it was not given uses it.
    """
    for name, metadata, default in table_fields(type(config)):
        value: Any = getattr(config, name)
        if value is not None and value != default:
            yield f"{type(config).__name__}.{name}={value!r}", metadata


def refused_settings(config: object) -> list[MegatronError]:
    """Return one problem for each setting that asks for what is not here."""
    return [
        ConfigError(
            f"{given} is not supported yet.",
            rule="a setting that would change the model or the data acts or is refused",
            flags=list(metadata.spellings),
            fix=metadata.refuse,
        )
        for given, metadata in _given(config)
        if metadata.refuse
    ]


def warn_of_unused_settings(config: object) -> None:
    """Warn of each setting that changes no result, and say why."""
    for given, metadata in _given(config):
        if metadata.note:
            warnings.warn(f"{given}: {metadata.note}.", stacklevel=_level_of_builder())


def _level_of_builder() -> int:
    """Return how far above `warn_of_unused_settings` a config is built, as `warnings` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (level == 1 or frame.f_code.co_name in _OF_A_DATACLASS):
        level, frame = level + 1, frame.f_back
    return level
