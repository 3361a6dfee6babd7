"""Rules that settings must obey, and the refusal of what does not exist."""

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
    architectures,
    batch,
    data,
    model,
    optimizer,
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


_ELSEWHERE = (MissingInputError, MissingCheckpointError)
_NO_CORPUS = (
    "No corpus is named: such a run trains on synthetic samples. --data-path and --tokenizer-type"
    " name your own."
)


def resolve_and_check(
    read: Callable[[], ParsedCommand],
    world_size: Callable[[RunConfig], int],
    *,
    absent: list[MegatronError] | None = None,
) -> ResolvedRun:
    """Read, derive and check the settings.

    One message has the unreadable flags, the whole numbers out of range and the broken rules. Wrong
    settings are replaced by their defaults before the rules are checked, and problems that only
    follow from these defaults are left out.

    Args:
        read: reads the command line, and the files that it names.
        world_size: number of ranks of a run with such settings.
        absent: takes the inputs that are not on this machine, of a run that is planned for
            another one; they are problems without it.
    Raises:
        ConfigError: with all problems.
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
