"""Megatron's functions to start a session without `pretrain`, for scripts with their own loop."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.resilience.status import RunStatus
from megatron.training.arguments import command_of_namespace
from megatron.training.cli.parser import ExtraArguments, ParsedCommand, parse_command_line
from megatron.training.setup.distributed import seed_everything
from megatron.training.setup.initialize import Session, start_session


def _set_random_seed(
    seed_: int,
    data_parallel_random_init: bool = False,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    pp_group: Any = None,
    dp_group: Any = None,
) -> None:
    """Seed all generators under Megatron's name, with the same seed on all ranks.

    Args:
        te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng: accepted; no tracker is used.
        pp_group, dp_group: accepted; random numbers do not depend on groups.
    Raises:
        ConfigError: `data_parallel_random_init` is set.
    """
    if data_parallel_random_init:
        raise ConfigError(
            "data_parallel_random_init is set.",
            rule="replicas start from equal weights",
            flags=["--data-parallel-random-init"],
            fix="leave it out",
        )
    seed_everything(seed_)


def initialize_megatron(
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, object] | None = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    store: object = None,
    parsed_args: Namespace | None = None,
) -> Session:
    """Read and check the settings, connect the processes, and set the variables of `global_vars`.

    Args:
        ignore_unknown_args: ignore unknown flags.
        allow_no_cuda: accepted; a machine without GPUs uses its CPU.
        skip_mpu_initialization: accepted only as False.
        parsed_args: result of `parse_args`, used instead of the command line.
    Raises:
        ConfigError: on all ranks, if settings are invalid; the error lists all problems.
    """
    if skip_mpu_initialization:
        raise TypeError("initialize_megatron() always creates the parallel groups")

    def read() -> ParsedCommand:
        if parsed_args is not None:
            return command_of_namespace(parsed_args, args_defaults or {})
        return parse_command_line(
            extra_args_provider=extra_args_provider,
            args_defaults=args_defaults,
            ignore_unknown_args=ignore_unknown_args,
        )

    status = RunStatus.of_this_process()
    return start_session(
        read,
        status,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        store=store,
    )
