"""Skip iterations that the user names, or, after a roll-back, the iterations before a spike.

PaLM was restarted about 100 steps before a spike and skipped 200 to 500 batches. The same samples
caused no spike at another point of training, so a spike depends on samples and weights together
(A. Chowdhery et al., "PaLM", section 5.1, arXiv 2204.02311).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron.core.foundation.errors import SpikeError
from megatron.core.utils import as_list
from megatron.resilience.rerun import with_rerun
from megatron.resilience.status import RunStatus
from megatron.training.checkpointing import Checkpointer
from megatron.training.datasets.iterators import build_data
from megatron.training.launch.printing import print_rank_0
from megatron.training.run.context import TrainingContext, TrainStep
from megatron.training.run.state import BatchPlan, RollbackNeeded, TakenStep, TrainState
from megatron.training.run.step import train_step
from megatron.training.run.update import skipped

Ranges = Sequence[tuple[int, int]]
"""(first, last) skipped iteration for each roll-back, in the order of the spikes."""


def num_rollbacks_at(iteration: int, earlier: Ranges, num_skipped: int) -> int:
    """Return how often the run was already rolled back for the place of a spike.

    Two consecutive spikes are at the same place if the second one is at most `num_skipped` steps
    after the iterations that were skipped for the first one.
    """
    count = 0
    for first, last in reversed(earlier):
        if iteration - last > num_skipped:
            break
        count, iteration = count + 1, first
    return count


def next_skipped(
    returned_to: int, spike: int, earlier: Ranges, num_skipped: int
) -> tuple[int, int]:
    """Return the (first, last) iteration to skip: not skipped before, at least up to the spike."""
    first = returned_to + 1
    while (last := next((b for a, b in earlier if a <= first <= b), None)) is not None:
        first = last + 1
    return first, max(first + num_skipped - 1, spike)


def with_skips(step: TrainStep, iterations: Collection[int]) -> TrainStep:
    """Wrap a step: do not train in `iterations` and in iterations that a roll-back skips."""

    def skip_or_take(context: TrainingContext, state: TrainState, plan: BatchPlan) -> TakenStep:
        iteration = state.iteration + 1
        if iteration not in iterations and not state.skips_iteration(iteration):
            return step(context, state, plan)
        for iterator in as_list(context.data.train):
            for _ in range(plan.num_microbatches if iterator is not None else 0):
                next(iterator)
        return dataclasses.replace(skipped(context, plan), was_passed_over=True)

    return skip_or_take


def resilient_step(context: TrainingContext) -> TrainStep:
    """Return `train_step` with reruns and skipped iterations, as set in the settings."""
    step = with_rerun(context, train_step)
    return with_skips(step, frozenset(context.run.schedule.iterations_to_skip))


class Rollback:
    """Return the run to an earlier state (--on-spike rollback). Calling it is a collective."""

    def __init__(
        self,
        context: TrainingContext,
        checkpointer: Checkpointer,
        dataset_provider: Callable[..., Any],
        status: RunStatus,
    ) -> None:
        self.context, self.checkpointer = context, checkpointer
        self.dataset_provider, self.status = dataset_provider, status

    def __call__(self, state: TrainState, spike: RollbackNeeded) -> TrainState:
        """Load the newest saved state, and reopen the data at its position.

        Args:
            state: before the refused step.
        Returns:
            the loaded state, with the iterations to skip.
        Raises:
            SpikeError: on all ranks, after --max-rollbacks at this place, or without saved state.
        """
        schedule, iteration = self.context.run.schedule, state.iteration + 1
        num_skipped = schedule.rollback_iterations_to_skip
        plan = self.context.plan_step(state.consumed_train_samples)
        first_sample = state.consumed_train_samples
        samples = f"samples {first_sample} to {first_sample + plan.global_batch_size - 1}"
        count = num_rollbacks_at(iteration, state.rolled_back, num_skipped)
        if count >= schedule.max_rollbacks:
            raise SpikeError(
                f"iteration {iteration}: {spike}; {samples}. The run has been rolled back for this"
                f" place {count} times.",
                rule="--max-rollbacks limits how often a run rolls back for the same place",
                flags=["--max-rollbacks", "--rollback-iterations-to-skip", "--lr"],
                fix="lower --lr, or resume with a larger --rollback-iterations-to-skip; no weight"
                " was changed by this step",
            )
        with self.status.doing("rolling back"):
            restored = self.checkpointer.load_newest(state.iteration)
            if restored is None:
                raise SpikeError(
                    f"iteration {iteration}: {spike}; {samples}. There is no earlier state yet.",
                    rule="with --on-spike rollback a run returns to a saved state",
                    flags=["--on-spike", "--save-interval"],
                    fix="lower --save-interval or --lr, or use --on-spike skip; no weight was"
                    " changed by this step",
                )
            loaded = restored.train_state
            skipped = next_skipped(loaded.iteration, iteration, state.rolled_back, num_skipped)
            returned = dataclasses.replace(
                loaded, data_order=state.data_order, rolled_back=(*state.rolled_back, skipped)
            )
            context = self.context
            context.data.close()
            context.data = build_data(context.run, self.dataset_provider, context.groups, returned)
        print_rank_0(
            f" WARNING: iteration {iteration}: {spike}; {samples}: rolled back to iteration"
            f" {loaded.iteration}, skipping the samples of iterations {skipped[0]} to"
            f" {skipped[1]} (time {count + 1} of --max-rollbacks {schedule.max_rollbacks} at this"
            " place)"
        )
        return returned
