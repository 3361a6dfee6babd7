"""The arguments of `pretrain`: the functions of a training script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.training.cli.parser import (
    DeepSpeedReader,
    ExtraArguments,
    ParsedCommand,
    UnreadableCommandError,
    parse_command_line,
)
from megatron.training.config.run import RunConfig
from megatron.training.launch import rank_info
from megatron.training.metrics.prediction import StepPrediction

LayoutSearch = Callable[[Sequence[str], str, int], str]
"""(command line, kind of GPU, number of GPUs) -> report."""

PredictStep = Callable[[ParsedCommand, int, bool], StepPrediction | None]
"""(settings, number of ranks, whether this rank writes the log) -> prediction."""


class PretrainCall:
    """The arguments of `pretrain`, in either form."""

    SCRIPT_FIRST = (
        "train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func",
        "process_non_loss_data_func", "extra_args_provider", "args_defaults",
        "get_embedding_ranks", "get_position_embedding_ranks", "non_loss_data_func", "store",
        "layout_search", "step_prediction", "deepspeed_reader",
    )  # fmt: skip
    CONFIG_FIRST = (
        "cfg_container", "train_valid_test_dataset_provider", "model_type", "forward_step_func",
        "model_provider", "process_non_loss_data_func", "get_embedding_ranks",
        "get_position_embedding_ranks", "non_loss_data_func", "store", "layout_search",
        "step_prediction",
    )  # fmt: skip
    NEEDED = ("train_valid_test_dataset_provider", "model_provider", "forward_step_func")

    def __init__(self, options: Mapping[str, Any]) -> None:
        missing = [name for name in self.NEEDED if options.get(name) is None]
        if missing:
            raise TypeError(f"pretrain() is missing {', '.join(missing)}")
        self.options = options
        self.config: RunConfig | None = options.get("cfg_container")
        self.dataset_provider = options["train_valid_test_dataset_provider"]
        self.model_provider = options["model_provider"]
        self.forward_step = options["forward_step_func"]
        self.extra_args_provider: ExtraArguments | None = options.get("extra_args_provider")
        self.args_defaults: Mapping[str, Any] = options.get("args_defaults") or {}
        self.deepspeed_reader: DeepSpeedReader | None = options.get("deepspeed_reader")
        self._command: ParsedCommand | None = None

    @staticmethod
    def of(given: Sequence[Any], named: Mapping[str, Any]) -> PretrainCall:
        """Assign positional and keyword arguments to names."""
        has_config = "cfg_container" in named or (given and isinstance(given[0], RunConfig))
        names = PretrainCall.CONFIG_FIRST if has_config else PretrainCall.SCRIPT_FIRST
        if len(given) > len(names):
            raise TypeError(f"pretrain() takes at most {len(names)} arguments, got {len(given)}")
        return PretrainCall({**dict(zip(names, given, strict=False)), **named})

    def read(self) -> ParsedCommand:
        """Return the passed settings, or the settings of the command line."""
        if self._command is None:
            if self.config is not None:
                given = frozenset(self.config.changed())
                self._command = ParsedCommand(config=self.config, given=given)
            else:
                self._command = parse_command_line(
                    extra_args_provider=self.extra_args_provider,
                    args_defaults=self.args_defaults,
                    deepspeed_reader=self.deepspeed_reader,
                )
                self._check_architecture(self._command.config.encoders.architecture)
        return self._command

    def _check_architecture(self, asked: str) -> None:
        """Refuse an architecture of the command line or of --load-hf that another script trains."""
        built = self.args_defaults.get("architecture", "gpt")
        if asked != built:
            folder = "examples/encoders/" if asked in ("bert", "t5") else ""
            script = f"{folder}pretrain_{asked}.py"
            raise ConfigError(
                f"the model is a {asked}, and this script builds a {built}.",
                rule="a script trains one architecture",
                flags=["--architecture", "--load-hf", "--preset"],
                fix=f"use {script}, or pass args_defaults={{'architecture': {asked!r}}}"
                " to pretrain() in a script of your own",
            )

    def is_dry_run(self) -> bool:
        """Return whether --dry-run is given, even if the command line is invalid."""
        try:
            return self.read().config.launch.dry_run
        except UnreadableCommandError as error:
            return error.command.config.launch.dry_run

    def asks_for_layout(self) -> bool:
        """Return whether --auto-parallel is given."""
        return self.read().config.launch.auto_parallel is not None

    def predicted_step(self) -> StepPrediction | None:
        """Return the prediction of the script's planner; None on ranks that write no log.

        Raises:
            ConfigError: a run of --calibrate-planner cannot be read.
        """
        predict: PredictStep | None = self.options.get("step_prediction")
        info = rank_info.read_rank_info()
        if predict is None:
            return None
        try:
            command = self.read()
        except UnreadableCommandError:
            return None  # the start of the session reports the error
        world_size = info.world_size if info.is_launched else 1
        is_shown = info.rank == world_size - 1
        # Without calibration the planner has data for GPUs only; then it is not even imported.
        is_known = is_shown and device.device_type() == "cuda"
        if not command.config.logging.calibrate_planner and not is_known:
            return None
        return predict(command, world_size, is_shown)

    def searched_layout(self) -> str:
        """Return the report of --auto-parallel.

        Raises:
            ConfigError: the script has no search, or there is no layout.
        """
        launch = self.read().config.launch
        search: LayoutSearch | None = self.options.get("layout_search")
        if search is None or launch.auto_parallel is None:
            raise ConfigError(
                "--auto-parallel in a script without a layout search.",
                rule="the script passes a layout search to pretrain()",
                flags=["--auto-parallel"],
                fix="use pretrain_gpt.py, or pass layout_search as pretrain_gpt.py does",
            )
        info = rank_info.read_rank_info()
        launched = info.world_size if info.is_launched else 0
        return search(sys.argv[1:], launch.auto_parallel, launch.dry_run_world_size or launched)
