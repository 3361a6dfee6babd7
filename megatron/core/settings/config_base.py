"""Shared by all config dataclasses: docstrings of fields, and checks reported in one error."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together


def check_all(config: Any, checks: Iterable[Callable[[Any], Iterable[MegatronError]]]) -> None:
    """Run independent checks on `config` and raise every problem in one ConfigError."""
    problems = [problem for check in checks for problem in check(config)]
    raise_together(problems, summary=type(config).__name__)


def range_problems(
    config: Any, limits: Iterable[tuple[str, str, float, float | None]]
) -> Iterator[ConfigError]:
    """Yield the error of each field that is outside of its range; None is in every range.

    Args:
        limits: (field, its flag, least value, first value that is too large or None).
    """
    for name, spelling, low, high in limits:
        value = getattr(config, name)
        if value is not None and not (value >= low and (high is None or value < high)):
            default = type(config).__dataclass_fields__[name].default
            span = f"at least {low:g}" if high is None else f"in [{low:g}, {high:g})"
            yield ConfigError(
                f"{name}={value}.",
                rule=f"{name} is {span}",
                flags=[spelling],
                fix=f"drop {spelling}" if default is None else f"drop {spelling} to use {default}",
            )


def choice_problems(
    config: Any, choices: Iterable[tuple[str, Sequence[str]]]
) -> Iterator[ConfigError]:
    """Yield the error of each field that is none of its choices.

    Args:
        choices: (field, its values; the first one is suggested).
    """
    for name, known in choices:
        if getattr(config, name) not in known:
            yield ConfigError(
                f"{name}={getattr(config, name)!r}.",
                rule=f"{name} is one of {', '.join(known)}",
                flags=["--" + name.replace("_", "-")],
                fix=f"use {known[0]!r}",
            )


@functools.cache
def field_docs(config_class: type) -> dict[str, str]:
    """Return field name -> the docstring under it, for own and inherited fields.

    Fields without a docstring, and classes without available source, are left out.
    """
    docs: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body  # type: ignore[attr-defined]
        for statement, following in zip(body, body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                docs[statement.target.id] = " ".join(following.value.value.split())
    return docs
