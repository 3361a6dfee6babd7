"""Registry of rules about combinations of settings; all broken rules are reported together.

Most rules are lines of `combinations.tsv`: two conditions that exclude each other, the rule, a fix,
and in further columns conditions without which the line does not apply. A condition is one of

    --flag         the flag does not have its default
    not --flag     the flag has its default
    --flag=A|B     the value, or one of several values, is one of these
    --flag!=A|B    it is none of these
    --flag>A       it is larger
    --flag%A       it is not a multiple

A and B are words, numbers, or flags in place of their values. A condition is about the resolved
settings, or about the given settings if `asked` precedes the flag. In rule and fix, `{name}` is the
value of a setting.
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
from megatron.core.utils import as_list
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import flags_by_spelling, plain

Rule = Callable[[ResolvedRun], Iterator[MegatronError]]

RULES: list[Rule] = []
"""All rules, in the order of their problems in the error."""

COMBINATIONS = Path(__file__).with_name("combinations.tsv")
_CONDITION = re.compile(r"(not )?(asked )?(--[\w-]+)(?:(!=|=|>|%)(.+))?")
_FLAG = re.compile(r"(?<!\S)--[a-zA-Z][\w-]*")


def rule(function: Rule) -> Rule:
    """Register a rule, a generator of the problems in a run's settings."""
    RULES.append(function)
    return function


def broken_rules(run: ResolvedRun) -> list[MegatronError]:
    """Return the problems found by all rules."""
    return [problem for check in RULES for problem in check(run)]


def problem(found: str, rule: str, *flags: str, fix: str) -> ConfigError:
    """Return the error of a broken rule; its flags are those in `found`, and `flags`."""
    named = dict.fromkeys([*_FLAG.findall(found), *flags])
    return ConfigError(found, rule=rule, flags=list(named), fix=fix)


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
        value, known = self.value(run), flags_by_spelling()
        if not self.relation:
            is_set = value != self.spec.default and (bool(value) or value is False)
            return is_set != self.is_negated
        operands = [run.values[known[o].name] if o in known else o for o in self.operands]
        if self.relation in ("=", "!="):
            words = {str(plain(operand)) for operand in operands}
            is_equal = any(str(each) in words for each in as_list(plain(value)))
            return is_equal == (self.relation == "=")
        if value is None or operands[0] is None:
            return False
        number = float(operands[0])
        return bool(value > number if self.relation == ">" else value % number)

    def shown(self, run: ResolvedRun) -> str:
        """Return the setting as words of the command line."""
        value = plain(self.value(run))
        if self.is_negated or self.spec.is_switch or value is None:
            return self.spec.flag
        words = [f"{v:g}" if isinstance(v, float) else str(v) for v in as_list(value)]
        return " ".join([self.spec.flag, *words])


Combination = tuple[Condition, Condition, str, str, tuple[Condition, ...]]


@functools.cache
def combinations() -> tuple[Combination, ...]:
    """Read `combinations.tsv`."""
    rows = [line.rstrip("\t").split("\t") for line in COMBINATIONS.read_text().splitlines()[1:]]
    return tuple(
        (Condition.of(a), Condition.of(b), why, fix, tuple(map(Condition.of, more)))
        for a, b, why, fix, *more in rows
    )


@rule
def settings_agree(run: ResolvedRun) -> Iterator[MegatronError]:
    """Apply the rules of `combinations.tsv`."""
    for first, second, reason, fix, provided in combinations():
        conditions = (first, second, *provided)
        if all(condition.holds(run) for condition in conditions):
            word = "without" if second.is_negated else "with"
            # The script sets the architecture, so the user cannot change it by a flag.
            flags = [c.spec.flag for c in conditions if c.spec.name != "architecture"]
            yield ConfigError(
                f"{first.shown(run)} {word} {second.shown(run)}.",
                rule=reason.format_map(run.values),
                flags=flags,
                fix=fix.format_map(run.values),
            )
