"""Megatron's global variables: args, tokenizer, timers, writers. Set once, for scripts to read.

`megatron.training` itself does not read its settings from here; functions receive them.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.foundation.errors import ConfigError
from megatron.core.models.model_settings import ModelSettings
from megatron.core.settings.flags import from_args
from megatron.core.timers import Timers
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as make_tokenizer
from megatron.training.config.batch import ScheduleSettings
from megatron.training.config.data import TokenizerSettings
from megatron.training.config.logging import LoggingSettings
from megatron.training.config.resolved import Topology

_slots: dict[str, Any] = {}


def _get(name: str, setter: str) -> Any:
    value = _slots.get(name)
    if value is None:
        raise ConfigError(
            f"{name} does not exist yet.",
            rule=f"{name} exists after initialize_megatron() or {setter}()",
            fix="call initialize_megatron() first, or use pretrain()",
        )
    return value


def get_args() -> Namespace:
    """Return the settings of the run by their Megatron names."""
    return _get("args", "set_args")


def set_args(args: Namespace | None) -> None:
    """Set the settings of the run."""
    publish(args=args)


def publish(**variables: object) -> None:
    """Set variables: args, tokenizer, timers, tensorboard_writer, wandb_writer, signal_handler."""
    _slots.update(variables)


def get_tokenizer() -> Any:
    """Return the run's tokenizer."""
    return _get("tokenizer", "set_global_variables")


def get_timers() -> Any:
    """Return the run's timers."""
    return _get("timers", "set_global_variables")


def get_tensorboard_writer() -> Any:
    """Return the TensorBoard writer; None on ranks without one."""
    return _slots.get("tensorboard_writer")


def get_wandb_writer() -> Any:
    """Return the Weights & Biases module of an open run; None on ranks without one."""
    return _slots.get("wandb_writer")


def get_signal_handler() -> Any:
    """Return the handler that records signals; None without --exit-signal-handler."""
    return _slots.get("signal_handler")


def set_global_variables(args: Namespace, build_tokenizer: bool = True) -> None:
    """Set the variables from checked settings, for scripts that initialize processes themselves.

    Args:
        args: result of `validate_args`.
        build_tokenizer: also build the tokenizer of the settings.
    """
    values = vars(args)
    logging, schedule = from_args(LoggingSettings, values), from_args(ScheduleSettings, values)
    topology = from_args(Topology, values)
    publish(args=args, timers=Timers(logging.timing_log_level, logging.timing_log_option))
    seq_length = from_args(ModelSettings, values).seq_length
    sizes = schedule.calculator_settings(topology.data_parallel_size, seq_length)
    calculator.reconfigure_num_microbatches_calculator(topology.rank, **sizes)
    if build_tokenizer and from_args(TokenizerSettings, values).tokenizer_type is not None:
        publish(tokenizer=make_tokenizer(args))


def unset_global_variables() -> None:
    """Empty all slots."""
    _slots.clear()


destroy_global_vars = unset_global_variables
"""Megatron's name for it."""
