"""Rules that settings must obey, and the refusal of what does not exist."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.foundation.errors import (
    MegatronError,
    MissingCheckpointError,
    MissingInputError,
    raise_together,
)
from megatron.training.checkpointing.stored_settings import with_checkpoint_shape
from megatron.training.cli.parser import ParsedCommand, UnreadableCommandError
from megatron.training.config.resolve import resolve
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import RunConfig
from megatron.training.launch.rank_info import read_machine
from megatron.training.rules import (  # noqa: F401
    adapters,
    batch,
    data,
    encoders,
    model,
    optimizer,
    parallelism,
    run_control,
    shared_rows,
    vision,
)
from megatron.training.rules.follow_ups import Unclear
from megatron.training.rules.registry import broken_rules
from megatron.training.rules.sizes import with_defaults_for, wrong_sizes
from megatron.training.rules.support import notes, refusals

__all__ = ["notes", "resolve_and_check"]


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

    Whole numbers out of range and flags that cannot be read are told together with broken rules:
    these are looked for with defaults in the place of what is wrong, and what would follow from
    the defaults is left out.

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
