"""Megatron's functions for reading the command line; `pretrain` uses them too."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.training.cli.parser import ExtraArguments, ParsedCommand, parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.config.resolved import Args, ResolvedRun
from megatron.training.config.run import RunConfig, all_flags
from megatron.training.config.transformer_settings import ConfigT, transformer_config_from_args
from megatron.training.launch import rank_info
from megatron.training.rules import resolve_and_check


def parse_args(
    extra_args_provider: ExtraArguments | None = None,
    ignore_unknown_args: bool = False,
    args: Sequence[str] | None = None,
) -> Namespace:
    """Read the command line (or `args`) without deriving or checking combinations.

    Raises:
        ConfigError: the command line is invalid; the error lists all problems.
    """
    command = parse_command_line(
        args, extra_args_provider=extra_args_provider, ignore_unknown_args=ignore_unknown_args
    )
    info = rank_info.read_rank_info()
    return Args(
        **{**command.config.flat(), **command.extra},
        rank=info.rank,
        world_size=info.world_size,
    )


def validate_args(args: Namespace, defaults: Mapping[str, object] | None = None) -> Namespace:
    """Derive missing settings and check all rules; updates `args` in place and returns it.

    Args:
        defaults: values for flags that still have their own default.
    """
    command = command_of_namespace(args, defaults or {})
    world_size = _world_size_of(args)
    run = resolve_and_check(lambda: command, lambda config: world_size)
    vars(args).update(vars(run.namespace()))
    if isinstance(args, Args):
        args.run = run
        args.remember(run)
    return args


def parse_and_validate_args(
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, object] | None = None,
    ignore_unknown_args: bool = False,
) -> Namespace:
    """Read and check the command line."""
    args = parse_args(extra_args_provider, ignore_unknown_args)
    return validate_args(args, args_defaults)


def run_config_from_args(args: Namespace) -> RunConfig:
    """Return the typed settings in a namespace; names that are not flags are ignored."""
    return RunConfig.from_values(_asked_values(args))


pretrain_cfg_container_from_args = run_config_from_args
"""Megatron's name for it."""


def run_from_args(args: Namespace, defaults: Mapping[str, object] | None = None) -> ResolvedRun:
    """Resolve the settings in a namespace."""
    command = command_of_namespace(args, defaults or {})
    return resolve(
        command.config,
        world_size=_world_size_of(args),
        machine=rank_info.read_machine(),
        extra=command.extra,
    )


def run_as_in(args: Namespace) -> ResolvedRun:
    """Return the settings in `args`, without deriving derived values again.

    Repeated calls return the same object until a setting changes.
    """
    known = args.unchanged_run() if isinstance(args, Args) else None
    if known is not None:
        return known
    run = run_from_args(args).overlaid(vars(args))
    if isinstance(args, Args):
        args.remember(run)
    return run


def _world_size_of(args: Namespace) -> int:
    return getattr(args, "world_size", None) or rank_info.read_rank_info().world_size


def command_of_namespace(args: Namespace, defaults: Mapping[str, object]) -> ParsedCommand:
    """Convert a namespace to a parsed command.

    Args:
        defaults: values for flags that still have their own default.
    """
    table = all_flags()
    values = _asked_values(args)
    for name, value in defaults.items():
        if name in table and values.get(name, table[name].default) == table[name].default:
            values[name] = value
    extra = {n: v for n, v in vars(args).items() if n not in table and n not in _derived_names()}
    config = RunConfig.from_values(values)
    return ParsedCommand(config=config, extra=extra, given=frozenset(config.changed()))


def _asked_values(args: Namespace) -> dict[str, Any]:
    """Return the given settings: derived values are left out unless they have changed since."""
    values = {n: v for n, v in vars(args).items() if n in all_flags()}
    run = getattr(args, "run", None)
    if not isinstance(run, ResolvedRun):
        return values
    asked = run.config.flat()
    return {n: asked[n] if v == run.values[n] else v for n, v in values.items()}


@functools.cache
def _derived_names() -> frozenset[str]:
    """Return the names in a resolved run that are not flags."""
    names = frozenset(resolve(RunConfig(), world_size=1).values)
    return names - frozenset(all_flags()) | {"unpadded_vocab_size"}


def core_transformer_config_from_args(
    args: Namespace, config_class: type[ConfigT] | None = None
) -> ConfigT:
    """Build the model's config from a namespace of Megatron's settings.

    Args:
        args: `get_args()` or a similar namespace; missing settings have the config's defaults.
        config_class: a subclass of TransformerConfig.
    """
    return transformer_config_from_args(vars(args), config_class)
