"""Registry of rules about combinations of settings; all broken rules are reported together.

Most rules are lines of `combinations.tsv`: two conditions that exclude each other, the rule, a fix,
and optionally a third condition; without it the line does not apply. The conditions are

    --flag         the flag does not have its default
    not --flag     the flag has its default
    --flag=A|B     the value is one of these
    --flag!=A|B    the value is none of these
    --flag>1       the value is larger

A condition reads the resolved settings, or the given settings if `asked` precedes the flag.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import FlagSpec
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import flags_by_spelling, plain

Rule = Callable[[ResolvedRun], Iterator[MegatronError]]

RULES: list[Rule] = []
"""All rules, in the order of their problems in the error."""

COMBINATIONS = Path(__file__).with_name("combinations.tsv")
_CONDITION = re.compile(r"(not )?(asked )?(--[\w-]+)(?:(!=|=|>)(.+))?")


def rule(function: Rule) -> Rule:
    """Register a rule, a generator of the problems in a run's settings."""
    RULES.append(function)
    return function


def broken_rules(run: ResolvedRun) -> list[MegatronError]:
    """Return the problems found by all rules."""
    return [problem for check in RULES for problem in check(run)]


def problem(found: str, rule: str, *flags: str, fix: str) -> ConfigError:
    """Shorter spelling of a ConfigError."""
    return ConfigError(found, rule=rule, flags=flags, fix=fix)


@dataclass(frozen=True)
class Condition:
    """A condition on one setting; see the module's docstring."""

    spec: FlagSpec
    is_negated: bool
    is_asked: bool
    relation: str
    operands: tuple[str, ...]

    @staticmethod
    def of(text: str) -> Condition:
        match = _CONDITION.fullmatch(text)
        assert match is not None, text
        negated, asked, spelling, relation, operands = match.groups()
        words = tuple((operands or "").split("|"))
        return Condition(
            flags_by_spelling()[spelling], bool(negated), bool(asked), relation or "", words
        )

    def value(self, run: ResolvedRun) -> Any:
        name = self.spec.name
        return run.config.value_of(name) if self.is_asked else run.values[name]

    def holds(self, run: ResolvedRun) -> bool:
        value = self.value(run)
        if self.relation == ">":
            return bool((value or 0) > float(self.operands[0]))
        if self.relation:
            return (str(plain(value)) in self.operands) == (self.relation == "=")
        is_set = value != self.spec.default and (bool(value) or value is False)
        return is_set != self.is_negated

    def shown(self, run: ResolvedRun) -> str:
        """Return the setting as words of the command line."""
        value = plain(self.value(run))
        if self.is_negated or self.spec.is_switch or value is None:
            return self.spec.flag
        values = value if isinstance(value, list) else [value]
        words = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
        return " ".join([self.spec.flag, *words])


@functools.cache
def combinations() -> tuple[tuple[Condition, Condition, str, str, Condition | None], ...]:
    """Read `combinations.tsv`."""
    rows = [line.split("\t") for line in COMBINATIONS.read_text().splitlines()[1:]]
    return tuple(
        (Condition.of(a), Condition.of(b), why, fix, Condition.of(third) if third else None)
        for a, b, why, fix, third in rows
    )


@rule
def settings_agree(run: ResolvedRun) -> Iterator[MegatronError]:
    """Apply the rules of `combinations.tsv`."""
    for first, second, reason, fix, provided in combinations():
        if first.holds(run) and second.holds(run) and (provided is None or provided.holds(run)):
            word = "without" if second.is_negated else "with"
            found = f"{first.shown(run)} {word} {second.shown(run)}."
            named = [each.spec for each in (first, second, provided) if each is not None]
            # The script sets the architecture, so the user cannot change it by a flag.
            flags = [spec.flag for spec in named if spec.name != "architecture"]
            yield problem(found, reason, *flags, fix=fix)
