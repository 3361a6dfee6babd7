"""`pretrain`, and the names that scripts import from `megatron.training.training`."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.resilience.failure import failures_reported
from megatron.resilience.restart_loop import RestartAttempt, run_with_restarts
from megatron.resilience.rollback import Rollback, resilient_step
from megatron.resilience.status import RunStatus
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import (
    DeepSpeedReader,
    ExtraArguments,
    ParsedCommand,
    UnreadableCommandError,
    parse_command_line,
)
from megatron.training.config.run import RunConfig
from megatron.training.datasets.iterators import build_data
from megatron.training.hooks.standard import standard_hooks
from megatron.training.launch import rank_info
from megatron.training.launch.printing import is_rank_0, print_rank_0
from megatron.training.metrics.prediction import StepPrediction
from megatron.training.run.loop import train
from megatron.training.run.state import StopReason
from megatron.training.setup.assemble import assemble, load_state
from megatron.training.setup.data_order_check import with_data_order
from megatron.training.setup.distributed import shut_down
from megatron.training.setup.initialize import Session, start_session
from megatron.training.setup.model import get_model
from megatron.training.setup.third_party import (
    build_train_valid_test_data_iterators,
    get_train_valid_test_num_samples,
    setup_model_and_optimizer,
    train_step,
)

__all__ = [
    "PretrainCall",
    "build_train_valid_test_data_iterators",
    "get_model",
    "get_train_valid_test_num_samples",
    "pretrain",
    "run_session",
    "setup_model_and_optimizer",
    "train_step",
]

LayoutSearch = Callable[[Sequence[str], str, int], str]
"""(command line, kind of GPU, number of GPUs) -> report."""

PredictStep = Callable[[ParsedCommand, int, bool], StepPrediction | None]
"""(settings, number of ranks, whether this rank writes the log) -> prediction."""


def pretrain(*given: Any, **named: Any) -> None:
    """Pretrain a model: settings, processes, model, data, loop, checkpoints.

    Both forms of Megatron's call work, with positional or keyword arguments:

        pretrain(dataset_provider, model_provider, model_type, forward_step_func,
                 process_non_loss_data_func=None, extra_args_provider=None, args_defaults={}, ...)
        pretrain(config_container, dataset_provider, model_type, forward_step_func,
                 model_provider, process_non_loss_data_func=None, ...)

    The first form reads the command line; the second does not.

    Args:
        dataset_provider: `(num_samples[, vp_stage, run])` -> train, valid and test datasets; see
            `datasets.iterators.build_data`.
        model_provider: `(pre_process, post_process, vp_stage, config, pg_collection, run)`, or some
            of these, -> one model chunk; see `setup.model.build_model`.
        forward_step_func: `(data_iterator, model)` -> output and loss function.
        process_non_loss_data_func: receives the results of `loss_func(output, non_loss_data=True)`
            after an evaluation.
        non_loss_data_func: `(model)` -> such data, instead of a forward step.
        layout_search: `(words, GPU, number of ranks)` -> report of --auto-parallel.
        step_prediction: `(settings, number of ranks, is_shown)` -> predicted time and memory of a
            step for the log line; called before the ranks connect.
        deepspeed_reader: reads the file of --deepspeed_config.
        extra_args_provider: adds a script's own flags to the parser.
        args_defaults: a script's defaults for flags that are not given.
    Raises:
        SystemExit: the run failed. The error was printed, and the exit code is the error's class.
    """
    _leave_out_imports()
    call = PretrainCall.of(given, named)
    status = RunStatus.of_this_process()
    with failures_reported(status):
        if call.is_dry_run():
            status.activity = "planning a dry run"
            print_rank_0(describe_run(call.read, call))
            return
        if call.asks_for_layout():
            status.activity = "searching a layout"
            if is_rank_0():
                print(call.searched_layout(), flush=True)
            return
        run_with_restarts(
            status,
            partial(_train_once, call, status),
            wants_restarts=lambda: call.read().config.logging.inprocess_restart,
        )


def _leave_out_imports() -> None:
    """Freeze imported modules (`gc.freeze`), so that garbage collections do not scan them.

    They are half a million objects of torch and of this package that never become garbage. At exit,
    the interpreter would scan them and all later objects again, which takes half a second of a
    short run. Objects without cycles are still freed at exit.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()
        atexit.register(gc.freeze)


def _train_once(
    call: PretrainCall,
    status: RunStatus,
    attempt: RestartAttempt | None,
) -> None:
    """Initialize this rank, train, and destroy its process groups."""
    status.activity = "predicting a step"
    prediction = call.predicted_step()
    session = start_session(
        call.read,
        status,
        get_embedding_ranks=call.options.get("get_embedding_ranks"),
        get_position_embedding_ranks=call.options.get("get_position_embedding_ranks"),
        store=call.options.get("store") if attempt is None else attempt.store,
        claims_save_directory=True,
        attempt=attempt,
    )
    run_session(session, call, prediction)
    shut_down()


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


def run_session(
    session: Session, call: PretrainCall, prediction: StepPrediction | None = None
) -> None:
    """Build model, optimizer and data, train, and evaluate at the end.

    Args:
        prediction: predicted time and memory of a step, on the rank that writes the log.
    """
    run, status = session.run, session.status
    with nullcontext() if session.signal is None else session.signal.paused():
        status.activity = "building the model"
        context, checkpointer = assemble(session, call.model_provider, call.forward_step)
        context.process_non_loss_data = call.options.get("process_non_loss_data_func")
        context.non_loss_data = call.options.get("non_loss_data_func")
        status.activity = "loading a checkpoint"
        state = load_state(run, checkpointer, status)
        status.activity = "building data"
        context.data = build_data(run, call.dataset_provider, session.groups, state)
        state = with_data_order(run, state, context.data.train_order)
        context.roll_back = Rollback(context, checkpointer, call.dataset_provider, status)
    attempt = session.attempt
    may_grow = attempt is not None and attempt.assignment.may_grow
    hooks = standard_hooks(
        context,
        status,
        checkpointer,
        signal=session.signal,
        tensorboard=session.tensorboard,
        wandb=session.wandb,
        prediction=prediction,
        waits_to_grow=(lambda: attempt.waits_to_grow) if attempt and may_grow else None,
    )
    if status.watch is not None:
        status.watch.answer_term()
    print_rank_0(f" > the setup is done; training begins at iteration {state.iteration}")
    if run.logging.log_rank != 0 and rank_info.is_on_several_machines():
        print_rank_0(
            f" > rank {run.topology.world_size - 1} on another machine prints losses;"
            " --log-rank 0 prints them here"
        )
    try:
        if run.schedule.skip_train:
            hooks.evaluate.after_training(state, StopReason.FINISHED)
        else:
            train(context, state, hooks, resilient_step(context))
    finally:
        hooks.close()
        context.data.close()
