"""Detect losses and gradient norms far above recent values: warn, refuse the update, or roll back.

A value is compared with the median of recent steps, in units of their median absolute deviation; an
earlier spike hardly changes either. After a roll-back, the iterations before the spike are skipped,
like iterations that the user names.

PaLM was restarted about 100 steps before a spike and skipped 200 to 500 batches. The same samples
caused no spike at another point of training, so a spike depends on samples and weights together
(A. Chowdhery et al., "PaLM", section 5.1, arXiv 2204.02311).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from megatron.core.foundation.errors import SpikeError
from megatron.core.optimizer.update import NormCheck
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import broadcast_object, largest_across_ranks
from megatron.core.utils import as_list
from megatron.resilience.rerun import with_rerun
from megatron.resilience.status import RunStatus
from megatron.training.checkpointing import Checkpointer
from megatron.training.datasets.iterators import build_data
from megatron.training.hooks.base import Hook
from megatron.training.launch.printing import print_rank_0
from megatron.training.run.context import TrainingContext, TrainStep
from megatron.training.run.state import BatchPlan, RollbackNeeded, TakenStep, TrainState
from megatron.training.run.step import train_step
from megatron.training.run.update import skipped

WINDOW, LIMIT = 50, 10.0
"""Number of recent steps, and the deviations above their median that make a value a spike."""
_NORM = "gradient norm"


class RecentValues:
    """The recent values of a loss or of the gradient norm.

    The first losses of a run fall fast: while there are fewer values than a fifth of the window,
    the threshold for a spike is much higher.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=WINDOW)

    def spike(self, value: float) -> str:
        """Return by how much a value exceeds the recent ones if it is a spike, else ""."""
        if len(self.values) < 3 or not math.isfinite(value):
            return ""
        scarcity = max(1.0, WINDOW / 5 / len(self.values))
        median = statistics.median(self.values)
        spread = statistics.median(abs(v - median) for v in self.values)
        deviation = max(1.4826 * spread, 0.01 * abs(median), 1e-8)
        distance = (value - median) / deviation
        most = LIMIT * scarcity**2
        if distance <= most:
            return ""
        return (
            f"{value:.6E} is {distance:.1f} deviations above the median {median:.6E} of the last"
            f" {len(self.values)} steps (threshold {median + most * deviation:.6E})"
        )

    def add(self, value: float) -> None:
        """Add a value if it is finite."""
        if math.isfinite(value):
            self.values.append(value)


class WarnOfSpikes(Hook):
    """Warn after a step whose loss is far above the recent losses."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self._recent: defaultdict[str, RecentValues] = defaultdict(RecentValues)

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Compare every loss with its recent values."""
        step = result.read()
        for name, value in step.losses.items():
            recent = self._recent[name]
            if found := recent.spike(value):
                last = state.consumed_train_samples
                self.warn(
                    f" WARNING: iteration {state.iteration}: {name} {found}; grad norm"
                    f" {step.grad_norm}, samples {last - step.num_samples} to {last - 1}."
                )
            recent.add(value)
        return state


class SpikeGuard(Hook):
    """Refuse an update whose loss or gradient norm is far above the recent values.

    All ranks judge the same values, so their decisions are equal. Refused values are not added to
    the recent values. The recent values are part of the state of the run, so that a resumed run
    decides like an uninterrupted run. The guard precedes all hooks that count or store a step.

    Args:
        policy: "warn" (of norms), "skip" the step, "rollback" to an earlier state, or "stop".
        warn: prints a line on the rank that logs.
        norm_checks: the list of the optimizer; None if norms are not judged.
    """

    def __init__(
        self, policy: str, warn: Callable[[str], None], norm_checks: list[NormCheck] | None
    ) -> None:
        self.norm_checks, self.policy, self.warn = norm_checks, policy, warn
        self._recent: defaultdict[str, RecentValues] = defaultdict(RecentValues)
        self._of_step: dict[str, float] = {}
        self._names: tuple[str, ...] | None = None
        self._losses: dict[str, float] = {}
        self._iteration = 0
        self._spike = ""

    def before_training(self, state: TrainState) -> TrainState:
        """Make the optimizer call the guard before every update."""
        if self.norm_checks is not None:
            self.norm_checks.append(lambda norm: self._judge(_NORM, norm))
        self.after_roll_back(state)
        return state

    def before_step(self, state: TrainState) -> None:
        """Drop the values of the previous step."""
        self._iteration = state.iteration + 1
        self._of_step, self._spike = {}, ""

    def share_losses(self, losses: Mapping[str, float], is_bad: bool) -> bool:
        """Share the losses of a step with all ranks; return whether a loss is not finite.

        Args:
            losses: means over the global batch on the last stage; {} on other stages.
            is_bad: whether a loss of this rank is not finite.
        Communication:
            one all-reduce of these numbers over all processes; at the first step of a run also a
            broadcast of their names.
        """
        world = torch_collectives.world()
        if self._names is None:
            self._names = broadcast_object(tuple(losses), world.size() - 1, world)
        mine = [losses.get(name, -math.inf) for name in self._names]
        known = [value if math.isfinite(value) else -math.inf for value in mine]
        *values, bad = largest_across_ranks([*known, float(is_bad)], world)
        self._losses = dict(zip(self._names, values, strict=True))
        return bool(bad)

    def judge_losses(self) -> str | None:
        """Return why the update with the shared losses is refused, or None."""
        judged = [self._judge(name, value) for name, value in self._losses.items()]
        return next((reason for reason in judged if reason is not None), None)

    def _judge(self, name: str, value: float) -> str | None:
        """Compare a value with the recent ones; return why the update is refused, or None.

        Raises:
            SpikeError: on all ranks, with the policy "stop".
        """
        found = self._recent[name].spike(value)
        if found and self.policy == "stop":
            raise SpikeError(
                f"iteration {self._iteration}: {name} {found}.",
                rule="with --on-spike stop, a run ends before the update of such a step",
                flags=["--check-for-spiky-loss", "--check-for-large-grads", "--on-spike"],
                fix="no weight was changed by this step: look at its samples, lower --lr, or use"
                " --on-spike skip or rollback",
            )
        if found and self.policy == "warn":
            self.warn(f" WARNING: iteration {self._iteration}: {name} {found}.")
        elif found:
            self._spike = f"{name} {found}"
            return self._spike
        self._of_step[name] = value
        return None

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Store the values of the step, or return to an earlier state.

        Raises:
            RollbackNeeded: on all ranks, with the policy "rollback".
        """
        if self._spike and self.policy == "rollback":
            raise RollbackNeeded(self._spike)
        for name, value in self._of_step.items():
            self._recent[name].add(value)
        values = {name: tuple(recent.values) for name, recent in self._recent.items()}
        return dataclasses.replace(state, recent_values=values)

    def after_roll_back(self, state: TrainState) -> None:
        """Read the recent values from the state of the run."""
        kept = {name: RecentValues(values) for name, values in state.recent_values.items()}
        self._recent = defaultdict(RecentValues, kept)


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
