"""Small rules about combinations of settings; all that are broken are reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.training.config.resolved import ResolvedRun

Rule = Callable[[ResolvedRun], Iterator[MegatronError]]

RULES: list[Rule] = []
"""In the order of their registration, which is the order of the message."""


def rule(function: Rule) -> Rule:
    """Register a rule: a generator of the problems that it sees in a run."""
    RULES.append(function)
    return function


def broken_rules(run: ResolvedRun) -> list[MegatronError]:
    """Return the problems that all rules together see."""
    return [problem for check in RULES for problem in check(run)]


def problem(found: str, rule: str, *flags: str, fix: str) -> ConfigError:
    """Shorter spelling of a ConfigError."""
    return ConfigError(found, rule=rule, flags=flags, fix=fix)
