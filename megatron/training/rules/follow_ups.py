"""Which problems only follow from a mistake that is told already."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.foundation.errors import MegatronError, flattened
from megatron.core.settings.flags import kebab
from megatron.training.cli.parser import ParsedCommand
from megatron.training.cli.suggest import suggestion
from megatron.training.config.run import all_flags, flags_by_spelling

SOURCES = ("--preset", "--load-hf", "--yaml-cfg", "--deepspeed_config", "--load-adapter")
"""Flags that name files with settings."""


class Unclear:
    """Settings whose meaning is not known, because something about them is wrong."""

    def __init__(self, problems: Sequence[MegatronError], command: ParsedCommand) -> None:
        """
        Args:
            problems: of reading the command line and the files that it names.
        """
        self.problems: list[MegatronError] = []
        self._flags: set[str] = set()
        self._given = {all_flags()[name].flag for name in command.given}
        self._lacks_a_source = False
        # Parts of a joint error name their flags, the error itself has none.
        for problem in flattened(problems):
            named = [flag for flag in SOURCES if flag in problem.flags]
            # A mistake in a file that names no setting: nothing is known of what it would set.
            names_no_setting = named == list(problem.flags)
            self.add(problem, source=named[0] if named and names_no_setting else "")

    def add(self, problem: MegatronError, *, source: str = "") -> None:
        """Take a problem in.

        Args:
            source: the flag of a file none of whose settings are known.
        """
        self.problems.append(problem)
        self._lacks_a_source |= bool(source)
        for flag in problem.flags:
            meant = flags_by_spelling().get(flag) or flags_by_spelling().get(suggestion(flag))
            self._flags |= {flag} if meant is None else {flag, meant.flag, kebab(meant.name)}

    def may_cause(self, problem: MegatronError) -> bool:
        """Return whether a problem might vanish with those that are told."""
        if self._flags & set(problem.flags):
            return True
        return self._lacks_a_source and not set(problem.flags) <= self._given
