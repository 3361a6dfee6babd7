"""Evaluation at intervals and at the end of a run, without dropout and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.resilience.status import RunStatus
from megatron.training.datasets.dynamic_cp import Packing
from megatron.training.hooks.base import Hook
from megatron.training.hooks.scalars import Scalars
from megatron.training.launch.printing import is_last_rank
from megatron.training.metrics.log_line import validation_lines
from megatron.training.run.context import TrainingContext
from megatron.training.run.loss_reduction import Report
from megatron.training.run.state import BatchPlan, StopReason, TakenStep, TrainState
from megatron.training.run.step import forward_backward
from megatron.training.run.update import loss_table


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    losses: Mapping[str, float]
    """Token means over all evaluated samples; empty except on the last pipeline stage."""
    num_samples: int
    non_loss_data: Any = None


def evaluate(
    context: TrainingContext,
    data: object,
    num_rows: int,
    plan: BatchPlan,
    *,
    packing: Packing | None = None,
    consumed_samples: int = 0,
    with_non_loss: bool = False,
    should_exit: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate on `num_rows` micro batches of all replicas from `data`.

    The loss is the mean over all tokens of all batches, not the mean of the batches' means.

    Args:
        plan: batch sizes of one pass through the pipeline; the last pass may be smaller.
        packing: packing of dynamic context parallelism.
        consumed_samples: samples of `data` before the evaluation, for `packing`.
        with_non_loss: also collect the data for `context.process_non_loss_data`.
        should_exit: called before every pass; it must return the same on all ranks.
    Returns:
        None if `should_exit` has interrupted the evaluation.
    """
    reports: list[Report] = []
    non_loss_data = None
    with _evaluating(context):
        for begin in range(0, num_rows, plan.num_microbatches):
            if should_exit():
                return None
            if packing is None:
                rows = min(plan.num_microbatches, num_rows - begin)
                part = dataclasses.replace(plan, num_microbatches=rows)
            else:
                part = packing.plan(consumed_samples + begin * plan.row_size)
            reports += forward_backward(
                context,
                data,
                begin * plan.row_size,
                part,
                forward_only=True,
                first_val_step=begin == 0,
            )
        if with_non_loss and context.process_non_loss_data is not None:
            non_loss_data = _non_loss_data(context, data, plan)
    return Evaluation(
        losses=loss_table(context, reports).means(context.groups.dp_cp),
        num_samples=num_rows * plan.row_size,
        non_loss_data=non_loss_data,
    )


def _non_loss_data(context: TrainingContext, data: Any, plan: BatchPlan) -> Any:
    """Run one more pass and collect the results of `loss_func(output, non_loss_data=True)`."""
    if context.non_loss_data is not None:
        return context.non_loss_data(context.model)
    return forward_backward(
        context,
        data,
        0,
        dataclasses.replace(plan, num_microbatches=1),
        forward_only=True,
        collect_non_loss_data=True,
    )


@contextmanager
def _evaluating(context: TrainingContext) -> Iterator[None]:
    """Switch the model to evaluation mode in this block."""
    for chunk in context.model:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in context.model:
            chunk.train()


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
