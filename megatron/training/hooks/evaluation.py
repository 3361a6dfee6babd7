"""Evaluate now and then, and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training.evaluate import Evaluation, evaluate
from megatron.training.hooks.base import Hook
from megatron.training.hooks.scalars import Scalars
from megatron.training.metrics.log_line import validation_lines
from megatron.training.parts import StepPlan, TrainingParts
from megatron.training.printing import is_last_rank
from megatron.training.state import StepResult, TrainState


class Evaluate(Hook):
    """Evaluates on the validation set every `interval` steps."""

    def __init__(
        self,
        parts: TrainingParts,
        *,
        interval: int,
        num_batches: int,
        plan: StepPlan,
        scalars: Scalars,
        write: Callable[[str], None],
    ) -> None:
        self.parts = parts
        self.interval = interval
        self.num_batches = num_batches
        self.plan = plan
        self.scalars = scalars
        self.write = write

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Evaluate when it is time."""
        if state.iteration % self.interval:
            return state
        found = self.report(self.parts.valid_data, state, f"iteration {state.iteration}")
        return state.evaluated(found.num_samples)

    def report(
        self, data: Any, state: TrainState, where: str, kind: str = "validation"
    ) -> Evaluation:
        """Evaluate on `data`, print the result and send it to the scalars."""
        found = evaluate(self.parts, data, self.num_batches, self.plan, with_non_loss=True)
        if is_last_rank():
            self.write(validation_lines(where, found.losses))
            self.scalars.write_evaluation(kind, dict(found.losses), state.iteration)
        if self.parts.process_non_loss_data is not None and is_last_rank():
            writer = next((s.writer for s in self.scalars.sinks if hasattr(s, "writer")), None)
            self.parts.process_non_loss_data(found.non_loss_data, state.iteration, writer)
        return found
