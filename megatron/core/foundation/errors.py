"""The exceptions that users of the framework see: subclasses of `MegatronError`.

Every error has four parts: the finding, the broken rule, the flags or files that control it, and a
fix that works. Programmer mistakes use `assert` with values instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

_SHOWN_ITEMS = 4
_SHOWN_LEVELS = 2
_SHOWN_INT_BITS = 128


def shown(value: object, limit: int = 80) -> str:
    """Return the text of an untrusted value for a message: at most `limit` + 3 characters.

    The work is bounded too: values are cut before they are formatted, only the first items of a
    container are shown, on two levels, and no method of an unknown class is called.
    """
    text = _shown(value, limit, _SHOWN_LEVELS)
    return text if len(text) <= limit else text[:limit] + "..."


def _shown(value: Any, limit: int, levels: int) -> str:
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        is_short = value.bit_length() <= _SHOWN_INT_BITS
        return str(int(value)) if is_short else f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        return repr(value[:limit]) + ("..." if len(value) > limit else "")
    if not isinstance(value, (tuple, list, dict, set, frozenset)):
        return f"<{type(value).__name__}>"
    if not levels and value:
        return f"<{type(value).__name__} of {len(value)}>"
    first = list(islice(value, _SHOWN_ITEMS))
    items = [_shown(item, limit, levels - 1) for item in first]
    if isinstance(value, dict):
        parts = (_shown(value[key], limit, levels - 1) for key in first)
        items = [f"{key}: {part}" for key, part in zip(items, parts, strict=True)]
    if len(value) > len(items):
        items.append(f"... {len(value)} in all")
    inner = ", ".join(items)
    if isinstance(value, tuple):
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f"[{inner}]" if isinstance(value, list) else f"{{{inner}}}"


class MegatronError(Exception):
    """Base of all errors that are meant to be read by a user."""

    is_agreed = False
    """Whether all ranks of a group raise this error together."""

    def __init__(
        self, found: str, *, rule: str = "", flags: Sequence[str] = (), fix: str = ""
    ) -> None:
        self.found = found
        self.rule = rule
        self.flags = tuple(flags)
        self.fix = fix
        self.problems: tuple[MegatronError, ...] = ()
        self.summary = ""
        super().__init__(self.describe())

    def describe(self) -> str:
        """Return the message: the finding, then rule, flags and fix, one line each."""
        lines = [self.found]
        if self.rule:
            lines.append(f"  rule:  {self.rule}")
        if self.flags:
            lines.append(f"  flags: {', '.join(self.flags)}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling passes arguments by position, so keyword-only fields need this.
        return _rebuild, (type(self), self.found, self.rule, self.flags, self.fix, self.problems)

    def named(self, who: str) -> MegatronError:
        """Return the same error with the name `who` in front of its message."""
        return _rebuild(
            type(self), f"{who}: {self.found}", self.rule, self.flags, self.fix, self.problems
        )


def _rebuild(
    kind: type[MegatronError],
    found: str,
    rule: str,
    flags: tuple[str, ...],
    fix: str,
    problems: tuple[MegatronError, ...],
) -> MegatronError:
    error = kind(found, rule=rule, flags=flags, fix=fix)
    error.problems = problems
    return error


class ConfigError(MegatronError):
    """A setting, or a combination of settings, that cannot work."""


class TopologyError(MegatronError):
    """Ranks, groups and axis sizes that do not fit together, or ranks that disagree."""


class PeerLostError(TopologyError):
    """Another rank has ended, or did not respond within the timeout."""


class CollectiveMismatchError(TopologyError):
    """Ranks of a group have called different collectives, or with different sizes."""


class ScheduleError(MegatronError):
    """A pipeline program that would deadlock, leak or compute the wrong thing."""


class DataError(MegatronError):
    """A corpus, index, tokenizer or token id that cannot be used."""


class WorkerLostError(MegatronError):
    """A loader worker process was killed, or died without an exception."""


class MissingInputError(DataError):
    """A corpus, tokenizer or list of corpora that is not on this machine; others may have it."""


class UntokenizableTextError(DataError):
    """A text that the library of a tokenizer refuses; it may accept other texts."""


class CheckpointError(MegatronError):
    """A checkpoint that is missing, damaged, incompatible or cannot be written."""


class MissingCheckpointError(CheckpointError):
    """A checkpoint that is not on this machine; others may have it."""


class NumericsError(MegatronError):
    """A loss or gradient that is not finite, found before the update of the weights."""


class ReplicaMismatchError(MegatronError):
    """Copies of one tensor on several ranks that are not equal: a fault of hardware or program."""


class SpikeError(MegatronError):
    """A gradient far above the recent ones, found before the update of the weights."""


class HardwareFaultError(MegatronError):
    """A machine that computes other results from the same inputs than other machines."""


class MissingExtraError(MegatronError):
    """An optional library is needed and not installed; the fix names the extra."""


def refuse_given(where: str, given: Mapping[str, object], *, rule: str, fix: str) -> None:
    """Raise `ConfigError` if an argument was given that is only accepted for compatibility.

    Args:
        where: the function, as its caller names it.
        given: argument -> its value; None and False count as not given.
    """
    asked = [name for name, value in given.items() if value is not None and value is not False]
    if asked:
        raise ConfigError(f"{where} was given {', '.join(asked)}.", rule=rule, fix=fix)


def raise_together(problems: Iterable[MegatronError], *, summary: str, note: str = "") -> None:
    """Raise all `problems` as one `ConfigError`, or return if there are none.

    The error keeps them in `problems`, so that a larger check can join them with its own.

    Args:
        problems: found by independent checks, in the order to be shown.
        summary: name of the checked object, for example "this command line".
        note: a last line for the reader of the problems.
    """
    found = flattened(problems)
    if found:
        text = described_together(found, summary=summary)
        error = ConfigError(text + (f"\n{note}" if note else ""))
        error.problems, error.summary = tuple(found), summary
        raise error


def flattened(problems: Iterable[MegatronError]) -> list[MegatronError]:
    """Replace joint errors by their parts, each with the name of the checked object."""
    found: list[MegatronError] = []
    for problem in problems:
        for part in flattened(problem.problems):
            found.append(part if problem.summary in part.found else part.named(problem.summary))
        if not problem.problems:
            found.append(problem)
    return found


def described_together(problems: Sequence[MegatronError], *, summary: str) -> str:
    """Return one numbered message of several problems."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    numbered = [
        f"[{i}] " + problem.describe().replace("\n", "\n    ")
        for i, problem in enumerate(problems, 1)
    ]
    return "\n".join([f"{count} in {summary}:", *numbered])
