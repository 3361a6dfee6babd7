"""The log line of the run, in Megatron's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron.core.foundation import device
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import control_group, union_across_ranks
from megatron.training.config.resolved import ResolvedRun
from megatron.training.hooks.base import Hook
from megatron.training.hooks.times import MeasureTimes
from megatron.training.launch.printing import is_last_rank, print_rank_0
from megatron.training.metrics.expert_load import (
    balance_losses,
    collect_loads,
    layer_lines,
    load_line,
)
from megatron.training.metrics.indexer_loss import indexer_loss
from megatron.training.metrics.log_line import TrainingLine, training_line
from megatron.training.metrics.params_norm import params_norm, weights_digest
from megatron.training.metrics.peak_flops import peak_flops
from megatron.training.metrics.prediction import StepPrediction, gibibytes
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import StepResult, StopReason, TakenStep, TrainState

_SLOW_LINES = 2
"""Number of consecutive slow log lines before the warning, so that one outlier causes none."""


class IntervalMeans:
    """Accumulates the steps since the last log line; results are read when the line is written."""

    def __init__(self) -> None:
        self._steps: list[TakenStep] = []
        self.seconds = 0.0
        self.num_tokens = 0
        self.flops = 0.0

    def add(self, result: TakenStep, seconds: float) -> None:
        """Count one step."""
        self._steps.append(result)
        self.seconds += seconds
        self.num_tokens += result.num_tokens
        self.flops += result.flops

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_skipped(self) -> int:
        """Number of steps that did not change the weights."""
        return sum(step.read().was_skipped for step in self._steps)

    @property
    def num_nan(self) -> int:
        """Number of steps with a loss that was not finite."""
        return sum(step.read().was_nan for step in self._steps)

    def mean_losses(self) -> dict[str, float]:
        """Return name -> mean over the steps with finite losses that were not skipped."""
        sums: dict[str, float] = {}
        trained = [
            s for s in (step.read() for step in self._steps) if not (s.was_skipped or s.was_nan)
        ]
        for step in trained:
            for name, value in step.losses.items():
                sums[name] = sums.get(name, 0.0) + value
        return {name: total / max(len(trained), 1) for name, total in sums.items()}


class SyncStepResults(Hook):
    """Reads results of steps before they are logged, evaluated or saved, so that an error ends the
    run first.

    Args:
        intervals: intervals of logging, evaluation and saving, in steps.
    """

    def __init__(self, intervals: Sequence[int]) -> None:
        self.intervals = intervals
        self._unread: list[TakenStep] = []

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Read all unread steps if one of the intervals ends."""
        if not result.is_read:
            self._unread.append(result)
        if any(state.iteration % every == 0 for every in self.intervals):
            self._read()
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Read all unread steps."""
        self._read()
        return state

    def _read(self) -> None:
        while self._unread:
            self._unread.pop(0).read()


def reading_intervals(run: ResolvedRun) -> list[int]:
    """Return the intervals of all parts of the run that need the results of steps."""
    every_step = run.schedule.check_for_spiky_loss or run.logging.log_straggler
    found = [
        1 if every_step else 0,
        run.logging.log_interval,
        run.logging.tensorboard_log_interval,
        run.schedule.eval_interval,
        run.checkpoint.save_interval,
        run.checkpoint.non_persistent_save_interval,
        run.schedule.check_weight_hash_across_dp_replicas_interval,
    ]
    return [every for every in found if every]


class LogLine(Hook):
    """Prints a line every `--log-interval` steps on the last rank, which computes the loss.

    The time per step excludes evaluations and checkpoints between steps; the shares of time from
    `times` include them.
    """

    def __init__(
        self,
        context: TrainingContext,
        times: MeasureTimes,
        write: Callable[[str], None],
        train_iters: int,
        prediction: StepPrediction | None = None,
    ) -> None:
        self.context = context
        self.times = times
        self.write = write
        self.train_iters = train_iters
        self.prediction = prediction
        self._num_slow = 0
        self.interval = context.run.logging.log_interval
        self._means = IntervalMeans()
        self._started_at = time.perf_counter()
        self._has_reported_memory = False
        self._last: TakenStep | None = None
        self._peak: float | None = None

    def before_training(self, state: TrainState) -> TrainState:
        """Print the predicted time of a step, and find the peak rate for --log-throughput."""
        if self.prediction is not None:
            self.write(f" > predicted: {self.prediction}")
        if self.context.run.logging.log_throughput and is_last_rank():
            self._peak = peak_flops(self.context.run.precision.params_dtype)
        return state

    def before_step(self, state: TrainState) -> None:
        """Start the clock."""
        self._started_at = time.perf_counter()

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Stop the clock, and write a line if the interval ends."""
        self._means.add(result, time.perf_counter() - self._started_at)
        self._last = result
        read = result.read() if result.is_read else None
        if read is not None and read.skip_reason is not None and is_last_rank():
            # Averages would hide which parameter overflowed first.
            self.write(f" iteration {state.iteration:8d} | step skipped: {read.skip_reason}"
                       f" | next loss scale: {read.loss_scale:.1f} |")  # fmt: skip
        if state.iteration % self.interval == 0:
            self._report(state, result)
        digest_interval = self.context.run.logging.log_digest_interval
        if digest_interval and state.iteration % digest_interval == 0:
            digest = weights_digest(self.context.model, self.context.groups)
            if is_last_rank():
                self.write(f" iteration {state.iteration:8d} | digest of the weights:"
                           f" {digest:016x} |")  # fmt: skip
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Write a line if there was none yet, and the reason why the loop ended."""
        if self._last is not None and not self._has_reported_memory:
            self._report(state, self._last)
        print_rank_0(
            f" [after training is done] iteration {state.iteration:8d} | stopped by: {stop.value} |"
        )
        return state

    def _report(self, state: TrainState, taken: TakenStep) -> None:
        context, means, result = self.context, self._means, taken.read()
        norm = (
            params_norm(context.model, context.groups)
            if context.run.logging.log_params_norm
            else None
        )
        loads = (
            collect_loads(context.model, context.groups)
            if context.run.experts.num_moe_experts
            else []
        )
        within = balance_losses(loads) | indexer_loss(context)
        if is_last_rank():
            self.write(training_line(self._line(state, result, norm, within)))
            self._judge(state)
            if loads:
                self.write(load_line(state.iteration, loads))
            for line in (
                layer_lines(state.iteration, loads) * context.run.experts.moe_per_layer_logging
            ):
                self.write(line)
        if not self._has_reported_memory:
            self._has_reported_memory = True
            print_rank_0(f" peak memory after {state.iteration} iterations on rank 0:"
                         f" {gibibytes(device.peak_memory_bytes())}")  # fmt: skip
        if context.run.logging.timing_log_level > 0:
            names = union_across_ranks(context.timers.names, torch_collectives.world())
            context.timers.log(names, normalizer=means.num_steps)
        self._means = IntervalMeans()

    def _judge(self, state: TrainState) -> None:
        """Warn once if steps are slower than predicted in `_SLOW_LINES` consecutive lines."""
        if self.prediction is None or self._num_slow >= _SLOW_LINES:
            return
        unusual = self.prediction.judge(self._means.seconds / self._means.num_steps)
        # The steps of the first line allocate and compile.
        is_first = not self._has_reported_memory
        self._num_slow = self._num_slow + 1 if unusual and not is_first else 0
        if self._num_slow == _SLOW_LINES:
            self.write(f" > slower than predicted at iteration {state.iteration}: {unusual}")

    def _line(
        self, state: TrainState, result: StepResult, norm: float | None, within: dict[str, float]
    ) -> TrainingLine:
        run, means = self.context.run, self._means
        per_device_s = means.seconds * run.topology.world_size
        tokens_per_s = means.num_tokens / per_device_s
        return TrainingLine(
            iteration=state.iteration,
            train_iters=self.train_iters,
            consumed_samples=state.consumed_train_samples,
            seconds_per_step=means.seconds / means.num_steps,
            learning_rate=result.learning_rate,
            decoupled_learning_rate=result.decoupled_learning_rate,
            global_batch_size=result.num_samples,
            losses=means.mean_losses() | within,
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
            max_attention_logit=result.max_attention_logit,
            params_norm=norm,
            num_skipped=means.num_skipped,
            num_nan=means.num_nan,
            tflops_per_device=means.flops / per_device_s / 1e12
            if run.logging.log_throughput
            else None,
            tokens_per_second_per_device=tokens_per_s,
            mfu=means.flops / per_device_s / self._peak if self._peak else None,
            time_shares=self.times.shares,
            prediction=self.prediction,
        )


class LinesForFirstRank(Hook):
    """Prints on rank 0 the lines of the last rank, which computes the losses.

    Args:
        intervals: intervals of the log lines of the last rank, in steps.
    """

    def __init__(self, intervals: Sequence[int | None]) -> None:
        self.intervals = [interval for interval in intervals if interval]
        self._lines: list[str] = []

    def write(self, text: str) -> None:
        """Keep a line until the next gather of all ranks."""
        self._lines.append(text)

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Gather lines if one of the intervals ends."""
        if any(state.iteration % interval == 0 for interval in self.intervals):
            self._pass_on()
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Gather the lines of the last evaluations."""
        self._pass_on()
        return state

    def _pass_on(self) -> None:
        everyone = control_group(torch_collectives.world()).gather(self._lines)
        self._lines = []
        for line in (everyone or [[]])[-1]:
            print(line, flush=True)

    def close(self) -> None:
        """Print the remaining lines on this rank if training has failed."""
        for line in self._lines:
            print(line, flush=True)
        self._lines = []
