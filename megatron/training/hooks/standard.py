"""Choose the hooks of a run by its settings, in calling order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.object_store import is_url
from megatron.core.foundation import device, optional_imports
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import any_across_ranks
from megatron.resilience.replica_check import CompareReplicas, ReplicaCheck
from megatron.resilience.signals import SignalFlag
from megatron.resilience.spike_guard import SpikeGuard, WarnOfSpikes
from megatron.resilience.status import RunStatus
from megatron.resilience.stragglers import LookForStragglers
from megatron.training.checkpointing import Checkpointer
from megatron.training.config.resolved import ResolvedRun, transitions_of
from megatron.training.hooks.base import Hook, Hooks
from megatron.training.hooks.evaluation import Evaluate
from megatron.training.hooks.log import (
    LinesForFirstRank,
    LogLine,
    SyncStepResults,
    reading_intervals,
)
from megatron.training.hooks.monitoring import monitoring_sinks
from megatron.training.hooks.profiling import CollectGarbage, MemoryHistory, Profile
from megatron.training.hooks.progress_file import ProgressFile, PublishCounters
from megatron.training.hooks.save import CopyState, Export, SaveCheckpoints
from megatron.training.hooks.scalars import (
    ProgressBar,
    Scalars,
    ScalarWriter,
    WandbRun,
    local_sinks,
)
from megatron.training.hooks.stop import (
    ExitDuration,
    ExitInterval,
    ExitOnSignal,
    PhaseEnd,
    StepBudget,
)
from megatron.training.hooks.times import MeasureTimes
from megatron.training.launch.printing import is_last_rank, is_rank_0
from megatron.training.metrics.prediction import StepPrediction
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import BatchPlan


class StandardHooks(Hooks):
    """All hooks, with a reference to the evaluation, the only hook of a run with --skip-train."""

    def __init__(self, hooks: list[Hook], evaluate: Evaluate) -> None:
        super().__init__(hooks)
        self.evaluate = evaluate


def standard_hooks(
    context: TrainingContext,
    status: RunStatus,
    checkpointer: Checkpointer | None,
    *,
    signal: SignalFlag | None = None,
    tensorboard: ScalarWriter | None = None,
    wandb: WandbRun | None = None,
    prediction: StepPrediction | None = None,
    waits_to_grow: Callable[[], bool] | None = None,
) -> StandardHooks:
    """Return the hooks for the settings of the run.

    A step is first counted, then logged, then evaluated, then saved; stop conditions are checked
    before the next step.
    """
    run = context.run
    bar = _progress_bar(run.logging.progress_bar, run.schedule.train_iters)
    write = bar.print if bar is not None else lambda text: print(text, flush=True)
    relay = None
    if run.logging.log_rank == 0 and run.topology.world_size > 1:
        relay = LinesForFirstRank([run.logging.log_interval, run.schedule.eval_interval])
        write = relay.write
    times = MeasureTimes(context)
    scalars = Scalars(
        context,
        times,
        local_sinks(tensorboard, wandb, run.logging.metrics_jsonl) + monitoring_sinks(run),
        run.logging.tensorboard_log_interval,
    )
    evaluate = Evaluate(
        context,
        plan=evaluation_plan(context),
        status=status,
        scalars=scalars,
        write=write,
        should_exit=lambda: (
            signal is not None and any_across_ranks(signal.is_set, torch_collectives.world())
        ),
    )
    hooks: list[Hook] = _guards(context, write)
    hooks += [SyncStepResults(reading_intervals(run)), PublishCounters(status), times]
    hooks += [bar] if bar is not None else []
    hooks += [LogLine(context, times, write, run.schedule.train_iters, prediction), scalars]
    if run.logging.log_straggler:
        hooks.append(LookForStragglers(context, times, scalars, write))
    if run.schedule.check_weight_hash_across_dp_replicas_interval:
        chunks: Any = context.model
        hooks.append(
            CompareReplicas(
                ReplicaCheck(chunks, context.optimizer, context.groups),
                run.schedule.check_weight_hash_across_dp_replicas_interval,
                [run.checkpoint.save_interval, run.checkpoint.non_persistent_save_interval],
            )
        )
    if run.schedule.check_for_spiky_loss and run.schedule.on_spike == "warn":
        hooks.append(WarnOfSpikes(write))
    hooks += _profilers(context)
    if run.schedule.manual_gc:
        garbage = CollectGarbage(
            run.schedule.manual_gc_interval, around_evaluation=run.schedule.manual_gc_eval
        )
        evaluate.at_begin_and_end = garbage.collect_around_evaluation
        hooks.append(garbage)
    if run.schedule.eval_interval is not None and run.schedule.eval_iters > 0:
        hooks.append(evaluate)
    if checkpointer is not None and checkpointer.memory is not None:
        interval = run.logging.inprocess_copy_interval
        hooks.append(CopyState(checkpointer.memory, interval, status, waits_to_grow))
    if checkpointer is not None and run.checkpoint.save is not None:
        hooks.append(
            SaveCheckpoints(
                checkpointer,
                run.checkpoint.save_interval,
                status,
                non_persistent_interval=run.checkpoint.non_persistent_save_interval,
                allowed_failures=run.checkpoint.allowed_save_failures,
            )
        )
        if run.checkpoint.save_hf is not None:
            hooks.append(Export(checkpointer.export_model, run.checkpoint.save_hf, status))
        if run.lora.save_adapter is not None:
            hooks.append(Export(checkpointer.export_adapters, run.lora.save_adapter, status))
    save_directory = local_save_directory(run)
    if run.logging.log_progress and save_directory is not None and is_rank_0():
        hooks.append(ProgressFile(save_directory, run.topology.world_size))
    hooks.append(StepBudget(run.schedule.train_iters))
    if signal is not None:
        hooks.append(ExitOnSignal(signal))
    if run.schedule.exit_duration_in_mins is not None:
        hooks.append(ExitDuration(run.schedule.exit_duration_in_mins))
    if transitions := transitions_of(run):
        hooks.append(PhaseEnd(transitions))
    if run.schedule.exit_interval is not None:
        hooks.append(ExitInterval(run.schedule.exit_interval))
    if relay is not None:  # last, because it prints the lines of the other hooks
        hooks.append(relay)
    return StandardHooks(hooks, evaluate)


def _guards(context: TrainingContext, write: Callable[[str], None]) -> list[Hook]:
    """Return the hooks that check losses and gradients before the update."""
    run, optimizer = context.run, context.optimizer
    judges_losses = run.schedule.check_for_spiky_loss and run.schedule.on_spike != "warn"
    if optimizer is None or not (judges_losses or run.ddp.check_for_large_grads):
        return []
    checks = optimizer.norm_checks if run.ddp.check_for_large_grads else None
    warn = write if is_last_rank() else lambda text: None
    guard = SpikeGuard(run.schedule.on_spike, warn, checks)
    if judges_losses:
        context.loss_guard = guard
    return [guard]


def local_save_directory(run: ResolvedRun) -> str | None:
    """Return --save if it is a local directory, None for an object store."""
    return (
        None if run.checkpoint.save is None or is_url(run.checkpoint.save) else run.checkpoint.save
    )


def evaluation_plan(context: TrainingContext) -> BatchPlan:
    """Return the batch sizes of an evaluation, which are constant during a batch size ramp."""
    samples, micro = context.run.schedule.eval_batch
    return BatchPlan(
        num_microbatches=samples // (micro * context.run.topology.data_parallel_size),
        micro_batch_size=micro,
        global_batch_size=samples,
    )


def _progress_bar(is_wanted: bool, train_iters: int) -> ProgressBar | None:
    """Return a progress bar if standard error of the last rank is a terminal."""
    if not (is_wanted and is_last_rank() and sys.stderr.isatty() and optional_imports.has("tqdm")):
        return None
    return ProgressBar(
        optional_imports.require("tqdm", purpose="the progress bar").tqdm, train_iters
    )


def _profilers(context: TrainingContext) -> list[Hook]:
    run = context.run
    hooks: list[Hook] = []
    if run.logging.profile and run.topology.rank in (run.logging.profile_ranks or [0]):
        directory = run.logging.tensorboard_dir or local_save_directory(run) or "."
        hooks.append(
            Profile(
                run.logging.profile_step_start,
                run.logging.profile_step_end,
                directory,
                run.topology.rank,
                use_torch=run.logging.use_pytorch_profiler,
            )
        )
    if run.logging.record_memory_history and device.device_type() == "cuda":
        hooks.append(MemoryHistory(run.logging.memory_snapshot_path))
    return hooks
