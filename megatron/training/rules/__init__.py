"""Check the settings of a run: rules, and refusal of unsupported flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.foundation.errors import (
    MegatronError,
    MissingCheckpointError,
    MissingInputError,
    flattened,
    raise_together,
)
from megatron.core.settings.flags import kebab
from megatron.training.checkpointing.stored_settings import with_checkpoint_shape
from megatron.training.cli.parser import ParsedCommand, UnreadableCommandError
from megatron.training.cli.suggest import suggestion
from megatron.training.config.resolve import resolve
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import RunConfig, all_flags, flags_by_spelling
from megatron.training.launch.rank_info import read_machine
from megatron.training.rules import (  # noqa: F401
    batch,
    data,
    model,
    parallelism,
    run_control,
)
from megatron.training.rules.registry import broken_rules
from megatron.training.rules.sizes import with_defaults_for, wrong_sizes
from megatron.training.rules.support import notes, refusals

__all__ = ["notes", "resolve_and_check"]


SOURCES = ("--preset", "--load-hf", "--yaml-cfg", "--deepspeed_config", "--load-adapter")
"""Flags that name files with settings."""


class Unclear:
    """The problems of invalid settings, and the flags whose values are unknown because of them."""

    def __init__(self, problems: Sequence[MegatronError], command: ParsedCommand) -> None:
        """
        Args:
            problems: problems of the command line and of the files that it names.
        """
        self.problems: list[MegatronError] = []
        self._flags: set[str] = set()
        self._given = {all_flags()[name].flag for name in command.given}
        self._lacks_a_source = False
        # The parts of a joint error have flags; the error itself has none.
        for problem in flattened(problems):
            named = [flag for flag in SOURCES if flag in problem.flags]
            # If the problem names a file but no setting, all settings of the file are unknown.
            names_no_setting = named == list(problem.flags)
            self.add(problem, source=named[0] if named and names_no_setting else "")

    def add(self, problem: MegatronError, *, source: str = "") -> None:
        """Add a problem.

        Args:
            source: the flag of a file, if all settings of the file are unknown.
        """
        self.problems.append(problem)
        self._lacks_a_source |= bool(source)
        for flag in problem.flags:
            meant = flags_by_spelling().get(flag) or flags_by_spelling().get(suggestion(flag))
            self._flags |= {flag} if meant is None else {flag, meant.flag, kebab(meant.name)}

    def may_cause(self, problem: MegatronError) -> bool:
        """Return whether a problem may be a consequence of the known problems."""
        if self._flags & set(problem.flags):
            return True
        return self._lacks_a_source and not set(problem.flags) <= self._given


_ELSEWHERE = (MissingInputError, MissingCheckpointError)
_NO_CORPUS = (
    "No corpus is named, so the run trains on synthetic samples. --data-path and --tokenizer-type"
    " select a corpus."
)


def resolve_and_check(
    read: Callable[[], ParsedCommand],
    world_size: Callable[[RunConfig], int],
    *,
    absent: list[MegatronError] | None = None,
) -> ResolvedRun:
    """Read, derive and check the settings.

    One error lists the invalid flags, the whole numbers out of range and the broken rules. Invalid
    settings are replaced by their defaults before the rules are checked, and problems that may be
    consequences of these defaults are left out.

    Args:
        read: reads the command line and the files that it names.
        world_size: returns the number of ranks of a run with these settings.
        absent: receives errors of inputs that are not on this machine, for a plan of a run on
            another machine. Without it, such an error is a problem.
    Raises:
        ConfigError: the settings are invalid; the error lists all problems.
    """
    problems: list[MegatronError] = []
    try:
        command = read()
    except UnreadableCommandError as error:
        command, problems = error.command, list(error.problems)
    unclear = Unclear(problems, command)
    config = command.config
    try:
        config = with_checkpoint_shape(config, command.given)
    except MegatronError as error:
        if absent is not None and isinstance(error, _ELSEWHERE):
            absent.append(error)
        else:
            unclear.add(error, source="--use-checkpoint-args")
    for name, problem in wrong_sizes(config).items():
        unclear.add(problem)
        config = with_defaults_for(config, {name})
    run = resolve(
        config,
        world_size=world_size(config),
        machine=read_machine(),
        extra=command.extra,
        notes=command.notes,
    )
    rules = [*refusals(config), *broken_rules(run)]
    if absent is not None:
        known = {each.found for each in absent}
        elsewhere = [broken for broken in rules if isinstance(broken, _ELSEWHERE)]
        absent += [broken for broken in elsewhere if broken.found not in known]
        rules = [broken for broken in rules if broken not in elsewhere]
    unclear.problems += [broken for broken in rules if not unclear.may_cause(broken)]
    summary = "this command line" if problems else "the settings of this run"
    is_synthetic = run.data.mock_data and not config.data.mock_data
    raise_together(unclear.problems, summary=summary, note=_NO_CORPUS if is_synthetic else "")
    return run
