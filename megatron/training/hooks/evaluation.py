"""Evaluate at intervals and at the end of training, and report the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.resilience.status import RunStatus
from megatron.training.datasets.dynamic_cp import Packing
from megatron.training.hooks.base import Hook
from megatron.training.hooks.scalars import Scalars
from megatron.training.launch.printing import is_last_rank
from megatron.training.metrics.log_line import validation_lines
from megatron.training.run.context import TrainingContext
from megatron.training.run.evaluate import evaluate
from megatron.training.run.state import BatchPlan, StopReason, TakenStep, TrainState


class Evaluate(Hook):
    """Evaluates on the validation set at every interval, and on validation and test set at the end.

    An evaluation may take much longer than a step, so an exit signal interrupts it. Its remaining
    samples still count as evaluated, so that the samples of later evaluations do not depend on
    signals.
    """

    def __init__(
        self,
        context: TrainingContext,
        *,
        plan: BatchPlan,
        status: RunStatus,
        scalars: Scalars,
        write: Callable[[str], None],
        should_exit: Callable[[], bool] = lambda: False,
    ) -> None:
        self.context = context
        self.plan = plan
        self.status = status
        self.scalars = scalars
        self.write = write
        self.should_exit = should_exit
        self.at_begin_and_end: Callable[[], object] = lambda: None

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Evaluate if the interval ends."""
        schedule = self.context.run.schedule
        interval, first = schedule.eval_interval, schedule.start_eval_at_iter or 0
        if interval is None or state.iteration % interval or state.iteration < first:
            return state
        return self._validate(state, f"iteration {state.iteration}")

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Evaluate the finished model; a run that stops early will be resumed."""
        if stop is not StopReason.FINISHED:
            return state
        state = self._validate(state, f"iteration {state.iteration} on validation set")
        self._report(
            self.context.data.test,
            self._num_rows(self.context.data.num_test_rows),
            state,
            f"iteration {state.iteration} on test set",
            kind="test",
            packing=self.context.data.test_packing,
        )
        return state

    def _validate(self, state: TrainState, where: str) -> TrainState:
        num_samples = 0
        for each in self.context.data.valid:
            kind = f"validation {each.name}" if each.name else "validation"
            of_set = f"{where} of {each.name}" if each.name else where
            rows = self._num_rows(each.num_rows)
            consumed = (
                0 if self.context.run.schedule.full_validation else (state.consumed_valid_samples)
            )
            self._report(
                each.data, rows, state, of_set, kind=kind, packing=each.packing, consumed=consumed
            )
            # All validation sets share one counter, which is the position in each of them.
            num_samples = max(num_samples, rows * self.plan.row_size)
        return state.evaluated(num_samples) if num_samples else state

    def _num_rows(self, available: int) -> int:
        """Return the number of micro batches of one evaluation, 0 without data."""
        if self.context.run.schedule.full_validation:
            return available
        return self.context.run.schedule.eval_iters * self.plan.num_microbatches if available else 0

    def _report(
        self,
        data: Any,
        num_rows: int,
        state: TrainState,
        where: str,
        kind: str,
        packing: Packing | None = None,
        consumed: int = 0,
    ) -> None:
        """Evaluate on `data`, print the losses and write them as scalars."""
        if num_rows == 0:
            return
        self.at_begin_and_end()
        with self.status.doing("evaluating"):
            found = evaluate(
                self.context,
                data,
                num_rows,
                self.plan,
                packing=packing,
                consumed_samples=consumed,
                with_non_loss=True,
                should_exit=self.should_exit,
            )
        self.at_begin_and_end()
        if found is None:
            if is_last_rank():
                self.write(f" the evaluation at {where} is skipped because of an exit signal")
        elif is_last_rank():
            self.write(validation_lines(where, found.losses))
            self.scalars.write_evaluation(kind, dict(found.losses), state.iteration)
            if self.context.process_non_loss_data is not None:
                writer = next((s.writer for s in self.scalars.sinks if hasattr(s, "writer")), None)
                self.context.process_non_loss_data(found.non_loss_data, state.iteration, writer)
