"""Shared by all config dataclasses: docstrings of fields, and checks reported in one error."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.foundation.errors import MegatronError, raise_together


def check_all(config: Any, checks: Iterable[Callable[[Any], Iterable[MegatronError]]]) -> None:
    """Run independent checks on `config` and raise every problem in one ConfigError."""
    problems = [problem for check in checks for problem in check(config)]
    raise_together(problems, summary=type(config).__name__)


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
