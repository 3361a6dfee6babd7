"""`pretrain`, and the names that scripts import from `megatron.training.training`."""

from __future__ import annotations

import atexit
import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron.resilience.failure import failures_reported
from megatron.resilience.restart_loop import RestartAttempt, run_with_restarts
from megatron.resilience.spike_guard import Rollback, resilient_step
from megatron.resilience.status import RunStatus
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.pretrain_call import PretrainCall
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
