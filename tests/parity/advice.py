"""Follow the advice of refusals: `python -m tests.parity.advice --cases 200`.

Draws command lines of `pretrain_gpt.py` with planted mistakes and plans each by `--dry-run`. The
`fix:` of every problem that names flags and values is applied to the command line as it is
written, the first of several alternatives. Exits with status 1 if the new command line has the
same problem again.
"""

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import MegatronError
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import FlagSpec
from megatron.training.config.run import flags_by_spelling
from tests.parity.dry_run import planned
from tests.parity.mistakes import draw_commands, words_of, write_inputs
from tests.parity.random_layouts.outcomes import without_numbers

_ALTERNATIVE = re.compile(r",? or |; |, where |, which |, (?=--)")
_REMOVE, _SET, _KEEP = "remove", "set", "keep"
_VERBS = {
    "drop": _REMOVE, "leave": _REMOVE, "remove": _REMOVE, "without": _REMOVE, "keep": _KEEP,
    "add": _SET, "use": _SET, "give": _SET, "set": _SET, "with": _SET,
}  # fmt: skip
_FILLER = {"out", "and", "at", "most", "least", "it", "too", "both", "instead", "of", "or", "to"}


def flags_at(words: Sequence[str], spec: FlagSpec | None, flag: str) -> list[slice]:
    """Return where a flag and its values are among the words, in any of its spellings."""
    spellings = {flag} if spec is None else {*spec.spellings, *spec.opposites}
    found = []
    for place, word in enumerate(words):
        if word.partition("=")[0] in spellings:
            end = place + 1
            while end < len(words) and not words[end].startswith("--"):
                end += 1
            found.append(slice(place, end))
    return found


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without a flag and its values."""
    words = list(words)
    for place in reversed(flags_at(words, flags_by_spelling().get(flag), flag)):
        del words[place]
    return words


def followed(words: Sequence[str], problem: MegatronError, folder: Path) -> list[str] | None:
    """Return the command line after the advice, or None if the advice names no flag to change.

    A number of ranks that the advice names is `--dry-run-world-size`.

    Args:
        folder: stands for a DIRECTORY that the advice leaves open.
    """
    fix = re.sub(r"[()]", " ", problem.fix)
    if fix.startswith("mkdir -p "):
        path = Path(fix.split()[-1])
        return None if not path.is_relative_to(folder) else list(words)
    first = _ALTERNATIVE.split(fix)[0]
    if found := re.match(r"start (\d+) ranks", first):
        return [*words, "--dry-run-world-size", found[1]]
    if found := re.match(r"did you mean (--\S+)\?", first):
        (place,) = (i for i, word in enumerate(words) if word.partition("=")[0] in problem.flags)
        rest = without_flag([*words[:place], *words[place + 1 :]], found[1])
        return [*rest[:place], found[1], *rest[place:]] if len(rest) == len(words) - 1 else None
    if (found := re.fullmatch(r"use (\w\S*)", first)) and len(problem.flags) == 1:
        first = f"use {problem.flags[0]} {found[1]}"
    parts, verb, done = first.split(), _SET, list(words)
    changed = False
    place = 0
    while place < len(parts):
        word = parts[place].rstrip(",.:?")
        place += 1
        if not word.startswith("--"):
            verb = _VERBS.get(word.lower(), verb)
            continue
        spec = flags_by_spelling().get(word)
        if spec is None:
            return None
        if verb == _KEEP:
            for other in problem.flags:
                if flags_by_spelling().get(other) is not spec:
                    done = without_flag(done, other)
        elif verb == _REMOVE:
            done = without_flag(done, word)
        else:
            values = []
            while place < len(parts) and not parts[place].startswith("--"):
                value = parts[place].rstrip(",")
                if spec.is_switch or value in _FILLER or (values and value in _VERBS):
                    break
                values.append(value)
                place += 1
                if parts[place - 1].endswith(",") or not spec.metadata.nargs:
                    break
            if not values and not spec.is_switch:
                return None  # a value that the reader knows
            if any(re.fullmatch(r"[A-Z]{3,}|/dev/shm/NAME", value) for value in values):
                values = [str(folder / "named")]
            done = [*without_flag(done, word), word, *values]
        changed = True
    return done if changed else None


def identity(problem: MegatronError) -> tuple[str, str, tuple[str, ...]]:
    """Return what is equal for one problem before and after a value has changed."""
    return without_numbers(problem.found), problem.rule, problem.flags


@dataclass(frozen=True)
class Advice:
    """One problem, what its advice made of the command line, and what was refused then."""

    words: list[str]
    problem: MegatronError
    changed: list[str] | None
    after: list[MegatronError]

    @property
    def is_in_vain(self) -> bool:
        """Whether the same problem is found again."""
        if self.changed is None:
            return False
        return identity(self.problem) in map(identity, self.after)

    def __str__(self) -> str:
        return f"{' '.join(self.words)}\n{self.problem}\nfollowed: {' '.join(self.changed or [])}"


def advice_on(words: list[str], num_ranks: int, folder: Path) -> list[Advice]:
    """Return each problem of a command line, followed by itself."""
    found = []
    for problem in planned(words, num_ranks)[1]:
        changed = followed(words, problem, folder)
        after = [] if changed is None else planned(changed, num_ranks)[1]
        found.append(Advice(words, problem, changed, after))
    return found


def draw_advice(seed: int, count: int, folder: Path) -> list[Advice]:
    """Return the advice on the problems of drawn command lines."""
    found: list[Advice] = []
    for case in draw_commands(seed, count):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        found += advice_on(words_of(case, write_inputs(folder)), case.ranks, folder)
    return found


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: int = 200
    seed: int = 1
    show: bool = False
    """Print the advice that names no flag to change, too."""


def main() -> int:
    """Follow the advice on drawn mistakes; print what was in vain."""
    flags = read_command_line(Flags, prog="python -m tests.parity.advice", description=__doc__)
    with tempfile.TemporaryDirectory(prefix="advice-") as folder:
        found = draw_advice(flags.seed, flags.cases, Path(folder, "case"))
    in_vain = {identity(one.problem): one for one in found if one.is_in_vain}
    for one in in_vain.values():
        print(f"IN VAIN\n{one}\n")
    unread = {one.problem.fix: one for one in found if one.changed is None}
    if flags.show:
        for one in unread.values():
            print(f"NOT FOLLOWED\n{one.problem}\n")
    count = sum(one.changed is not None for one in found)
    print(f"{len(found)} problems of {flags.cases} command lines: the advice on {count} was")
    print(f"followed, {sum(one.is_in_vain for one in found)} times in vain")
    return 1 if in_vain else 0


if __name__ == "__main__":
    sys.exit(main())
