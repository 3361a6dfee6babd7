"""A command line as data: flag -> value, the parts of it that say how, and options to draw."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]
"""Flag without its dashes -> True for a switch, a value, or a tuple of values."""

Condition = Callable[[Settings], bool]


@dataclass(frozen=True)
class Option:
    """A flag and how likely each of its values is; None is to leave the flag out.

    With an empty name the values are switches, of which one is set.
    """

    name: str
    values: Mapping[Any, float]
    when: Condition = field(default=lambda s: True)

    def draw(self, settings: Settings, rng: random.Random) -> None:
        """Set the flag in `settings`, or not."""
        if not self.when(settings):
            return
        chosen = rng.choices(list(self.values), weights=list(self.values.values()))[0]
        if chosen is None:
            return
        if self.name:
            settings[self.name] = chosen
        else:
            settings[chosen] = True


def switch(name: str, share: float, when: Condition = lambda s: True) -> Option:
    """Return the option of a switch that is on in this share of the cases."""
    return Option(name, {True: share, None: 1 - share}, when)


def draw_all(options: Sequence[Option], settings: Settings, rng: random.Random) -> None:
    """Draw options in their order: conditions read what was drawn before."""
    for option in options:
        option.draw(settings, rng)


def given(*names: str) -> Condition:
    """Return a condition: one of these flags is given."""
    return lambda s: any(name in s for name in names)


def without(*names: str) -> Condition:
    """Return a condition: none of these flags is given."""
    return lambda s: not any(name in s for name in names)


def to_words(settings: Settings) -> list[str]:
    """Return the words of the command line."""
    words = []
    for name, value in settings.items():
        words.append(f"--{name}")
        if value is not True:
            words += map(str, value if isinstance(value, tuple) else (value,))
    return words


def from_words(words: Sequence[str]) -> Settings:
    """Read a command line; every value stays text."""
    settings: Settings = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            settings[name] = True
        elif settings[name] is True:
            settings[name] = word
        else:
            held = settings[name]
            settings[name] = (*held, word) if isinstance(held, tuple) else (held, word)
    return settings


def number(settings: Settings, name: str, default: int = 1) -> int:
    """Return a whole number that a flag gives."""
    return int(settings.get(name, default))
