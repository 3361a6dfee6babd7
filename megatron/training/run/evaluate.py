"""Evaluation: the mean loss over held-out batches, without dropout and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.training.datasets.dynamic_cp import Packing
from megatron.training.run.context import TrainingContext
from megatron.training.run.loss_reduction import Report
from megatron.training.run.state import BatchPlan
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
