"""What a step works with, gathered in one value by `setup`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.foundation.errors import NumericsError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.model_size import ModelSize
from megatron.training.run.loss_reduction import LossTable
from megatron.training.run.state import RollBack, TrainState


@dataclass
class ValidationSet:
    """One set that is evaluated by itself."""

    name: str
    """Told in the log; empty if there is one set only."""
    data: Any
    """Its iterator, or one for each chunk; None on ranks that read no data."""
    num_rows: int
    """Micro batches of all replicas in the set, equal on all ranks; 0 if there is none."""
    packing: Packing | None = None
    """How its global batches become rows, where samples of uneven length share them."""


@dataclass
class DataIterators:
    """Iterators of micro batches; None where a split is not read on this rank.

    With several model chunks per rank each is a list with one iterator per chunk.
    """

    train: Any = None
    valid: list[ValidationSet] = field(default_factory=list)
    """One set, or several with --multiple-validation-sets."""
    test: Any = None
    train_order: Any = None
    """`order_fingerprint()` of the training set on rank 0, if it tells one."""
    num_test_rows: int = 0
    """Micro batches of all replicas in the test set, equal on all ranks; 0 if there is none."""
    train_packing: Packing | None = None
    test_packing: Packing | None = None
    """As `ValidationSet.packing`."""
    train_lengths: Callable[[int, int], tuple[int, ...]] | None = None
    """(Consumed samples, count) -> tokens of each of the samples that follow, without padding.
    None: samples are full."""

    def close(self) -> None:
        """End the loaders' worker processes now.

        Left to the garbage collector they would not hear of it, because the queues that tell them
        are collected first, and each would never come.
        """
        for held in (self.train, self.test, *(each.data for each in self.valid)):
            for iterator in held if isinstance(held, list) else [held]:
                if isinstance(iterator, Generator):
                    iterator.close()


@dataclass(frozen=True)
class StepPlan:
    """How one step cuts its samples."""

    num_microbatches: int
    micro_batch_size: int
    global_batch_size: int
    sample_lengths: tuple[int, ...] | None = None
    """Tokens of each sample, where padding follows some of them or a micro batch joins several."""

    @property
    def row_size(self) -> int:
        """Samples of one micro batch of all replicas."""
        return self.global_batch_size // self.num_microbatches


class Packing(Protocol):
    """How global batches of samples of uneven length become micro batches."""

    def plan(self, consumed: int) -> StepPlan:
        """Return how the step after `consumed` samples cuts them."""
        ...


class MicrobatchPlanner:
    """Asks the (global, third parties read it too) microbatch calculator before each step."""

    def __init__(self, micro_batch_size: int) -> None:
        self.micro_batch_size = micro_batch_size

    def plan(self, consumed_samples: int) -> StepPlan:
        """Return the plan of the step that begins after `consumed_samples`."""
        calculator.update_num_microbatches(consumed_samples, consistency_check=True, verbose=True)
        return StepPlan(
            num_microbatches=calculator.get_num_microbatches(),
            micro_batch_size=self.micro_batch_size,
            global_batch_size=calculator.get_current_running_global_batch_size(),
        )


class Rerun(Protocol):
    """What a step does about losses and gradients that are not finite."""

    def record(self, context: TrainingContext, state: TrainState, plan: StepPlan) -> Any:
        """Return iterators over the samples of a step, which remember what was taken."""
        ...

    def diagnose(self, context: TrainingContext, problem: NumericsError) -> LossTable | None:
        """Find the cause. Returns the losses of a run whose gradients are right, or None: skip.

        Raises:
            MegatronError: on all ranks; the run shall end.
        """
        ...


class LossGuard(Protocol):
    """What judges the losses of a step before the update."""

    def share_losses(self, losses: Mapping[str, float], is_bad: bool) -> tuple[list[float], bool]:
        """Give all ranks the losses of the last stage, and whether any rank has a bad one."""
        ...

    def judge_losses(self, values: list[float]) -> str | None:
        """Return why a step is refused; None: take it."""
        ...


def _no_roll_back(state: TrainState, spike: RollBack) -> TrainState:
    raise spike


@dataclass
class TrainingContext:
    """Everything that steps and evaluations use."""

    run: ResolvedRun
    groups: ProcessGroupCollection
    model: list[nn.Module]
    """This rank's chunks, wrapped for data parallelism."""
    config: Any
    """The TransformerConfig that all chunks share."""
    optimizer: Any
    scheduler: Any
    """Learning rate and weight decay by consumed samples."""
    forward_step: Callable[..., Any]
    forward_backward: Callable[..., Any]
    microbatches: MicrobatchPlanner
    timers: Timers
    size: ModelSize
    data: DataIterators = field(default_factory=DataIterators)
    process_non_loss_data: Callable[..., Any] | None = None
    non_loss_data: Callable[..., Any] | None = None
    iterations_to_skip: frozenset[int] = frozenset()
    """Iterations (1-based) whose samples are passed over."""
    rerun: Rerun | None = None
    """Runs a step again that is not finite; None: such a step ends the run."""
    loss_guard: LossGuard | None = None
    """Asked before every update; None: losses are not judged, or after the update."""
    roll_back: Callable[[TrainState, RollBack], TrainState] = _no_roll_back
    """Returns the run to an earlier state than the one before the refused step: collective."""

    def plan_step(self, consumed_samples: int) -> StepPlan:
        """Return how the step after `consumed_samples` cuts its samples."""
        plan = self.microbatches.plan(consumed_samples)
        packing, lengths = self.data.train_packing, self.data.train_lengths
        if packing is not None:
            return packing.plan(consumed_samples)
        if lengths is None:
            return plan
        return replace(plan, sample_lengths=lengths(consumed_samples, plan.global_batch_size))

    @property
    def reads_steps_later(self) -> bool:
        """Whether losses and norm are read when they are logged, and not at the end of each step.

        Not where the next step depends on them: a loss scale, a step that may be run again, a
        schedule that stands still when an update is refused, a judgement of losses.
        """
        return (
            self.run.schedule.rerun_mode == "disabled"
            and self.run.schedule.check_for_nan_in_loss_and_grad
            and not self.run.precision.fp16
            and self.loss_guard is None
            and getattr(self.optimizer, "decides_on_device", False)
        )

    @classmethod
    def of(cls, run: ResolvedRun, **parts: Any) -> TrainingContext:
        """Return the context of `run`; `parts` are the fields that do not follow from it."""
        return cls(
            run=run,
            microbatches=MicrobatchPlanner(run.schedule.micro_batch_size),
            size=ModelSize.from_settings(run),
            **parts,
        )
