"""The inputs of a training step; `setup` builds them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.training.config.resolved import ResolvedRun
from megatron.training.datasets.dynamic_cp import Packing
from megatron.training.metrics.model_size import ModelSize
from megatron.training.run.state import BatchPlan, RollbackNeeded, TakenStep, TrainState

if TYPE_CHECKING:
    from megatron.resilience.spike_guard import SpikeGuard


@dataclass
class ValidationSet:
    """One validation set, evaluated separately."""

    name: str
    """Name in the log; empty for a single set."""
    data: Any
    """Iterator of micro batches, or a list with one per chunk; None on ranks without data."""
    num_rows: int
    """Number of micro batches of all replicas, equal on all ranks; 0 without data."""
    packing: Packing | None = None
    """Packing of dynamic context parallelism."""


@dataclass
class DataIterators:
    """Iterators of micro batches; None if this rank does not read the split.

    With several model chunks per rank, each is a list with one iterator per chunk.
    """

    train: Any = None
    valid: list[ValidationSet] = field(default_factory=list)
    """One set, or several with --multiple-validation-sets."""
    test: Any = None
    train_order: Any = None
    """`order_fingerprint()` of the training set on rank 0, if the dataset has it."""
    num_test_rows: int = 0
    """Micro batches of all replicas in the test set, equal on all ranks; 0 without a test set."""
    train_packing: Packing | None = None
    test_packing: Packing | None = None
    train_lengths: Callable[[int, int], tuple[int, ...]] | None = None
    """(consumed samples, count) -> tokens of each of the next `count` samples, without padding.
    None if samples have no padding."""

    def close(self) -> None:
        """End the loaders' worker processes now.

        Close them explicitly: if the garbage collector destroys the queues first, the workers never
        receive the stop message.
        """
        for held in (self.train, self.test, *(each.data for each in self.valid)):
            for iterator in held if isinstance(held, list) else [held]:
                if isinstance(iterator, Generator):
                    iterator.close()


def _no_rollback(state: TrainState, spike: RollbackNeeded) -> TrainState:
    raise spike


@dataclass
class TrainingContext:
    """Inputs of training steps and evaluations."""

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
    timers: Timers
    data: DataIterators = field(default_factory=DataIterators)
    process_non_loss_data: Callable[..., Any] | None = None
    non_loss_data: Callable[..., Any] | None = None
    loss_guard: SpikeGuard | None = None
    """Checks the losses before every update; the optimizer's `norm_checks` check the norm."""
    roll_back: Callable[[TrainState, RollbackNeeded], TrainState] = _no_rollback
    """Loads an earlier state after a refused step. Collective."""

    @cached_property
    def size(self) -> ModelSize:
        """Sizes of the model, for the count of operations."""
        return ModelSize.from_settings(self.run)

    def current_plan(self) -> BatchPlan:
        """Return the plan of Megatron's micro batch calculator, which scripts read too."""
        return BatchPlan(
            num_microbatches=calculator.get_num_microbatches(),
            micro_batch_size=self.run.schedule.micro_batch_size,
            global_batch_size=calculator.get_current_running_global_batch_size(),
        )

    def plan_step(self, consumed_samples: int) -> BatchPlan:
        """Return the plan of the step after `consumed_samples`."""
        calculator.update_num_microbatches(consumed_samples, consistency_check=True, verbose=True)
        plan = self.current_plan()
        packing, lengths = self.data.train_packing, self.data.train_lengths
        if packing is not None:
            return packing.plan(consumed_samples)
        if lengths is None:
            return plan
        return replace(plan, sample_lengths=lengths(consumed_samples, plan.global_batch_size))


TrainStep = Callable[[TrainingContext, TrainState, BatchPlan], TakenStep]
"""`train_step` or a wrapper around it."""
