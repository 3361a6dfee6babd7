"""The micro batches and the result of a step, and the counters of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar


class RanksChange(Exception):
    """All ranks end the loop after a step, because new ranks wait to join."""


class RollbackNeeded(Exception):
    """All ranks refuse a step for the given reason, and load an earlier state."""


class StopReason(Enum):
    """Why the loop ended."""

    FINISHED = "all steps are done"
    EXIT_INTERVAL = "--exit-interval"
    PHASE_END = "--phase-transition-iterations"
    EXIT_DURATION = "--exit-duration-in-mins"
    EXIT_SIGNAL = "a signal"


@dataclass(frozen=True)
class BatchPlan:
    """Division of a global batch into micro batches."""

    num_microbatches: int
    micro_batch_size: int
    global_batch_size: int
    sample_lengths: tuple[int, ...] | None = None
    """Tokens of each sample without padding; None if all samples are full."""

    @property
    def row_size(self) -> int:
        """Samples of one micro batch of all replicas."""
        return self.global_batch_size // self.num_microbatches


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one optimizer step."""

    losses: Mapping[str, float]
    """Token means over the global batch, by name; empty except on the last pipeline stage."""
    grad_norm: float | None
    num_zeros: float | None
    learning_rate: float
    """Learning rate of this step."""
    decoupled_learning_rate: float | None
    loss_scale: float
    num_samples: int
    """Global batch size of the step."""
    num_microbatches: int
    was_skipped: bool
    """The weights did not change: overflow under fp16, or --iterations-to-skip."""
    skip_reason: str | None = None
    """Why the step was skipped: a gradient overflow, or a loss or gradient norm far above the
    recent values."""
    was_passed_over: bool = False
    """The step consumed its samples without computing anything."""
    was_nan: bool = False
    """A loss was not finite and the check was switched off."""
    max_attention_logit: float | None = None
    """Maximum over all heads and layers, with --log-max-attention-logit."""
    num_tokens: int = 0
    """Tokens of the global batch."""
    flops: float = 0.0
    """Operations of all ranks together."""

    is_read: ClassVar[bool] = True

    def read(self) -> StepResult:
        """Return the result itself; see `AsyncStepResult.read`."""
        return self


class AsyncStepResult:
    """A future of `StepResult`: losses, norm and success of the step are still on the device.

    All ranks must call `read` together, because it sums values over ranks.

    Args:
        read: reads the result from the device.
        num_samples, num_tokens, flops: see `StepResult`.
    """

    was_passed_over: ClassVar[bool] = False

    def __init__(
        self, read: Callable[[], StepResult], *, num_samples: int, num_tokens: int, flops: float
    ) -> None:
        self.num_samples, self.num_tokens, self.flops = num_samples, num_tokens, flops
        self._read = read
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """Whether `read` was called."""
        return self._result is not None

    def read(self) -> StepResult:
        """Return the result of the step.

        Raises:
            NumericsError: on all ranks, if a loss or gradient of this step was not finite.
        """
        if self._result is None:
            self._result = self._read()
        return self._result


TakenStep = StepResult | AsyncStepResult
"""Result of `train_step`: a value or a future."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Global counters of a run."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    flops_so_far: float = 0.0
    data_order: Mapping[str, Any] | None = None
    """Fingerprint of the order of the training samples; None if the dataset has none."""
    recent_values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Losses and gradient norms of the last steps, if spikes are detected before the update."""
    rolled_back: tuple[tuple[int, int], ...] = ()
    """(first, last) skipped iteration of every rollback, in order."""

    def advanced(self, result: TakenStep) -> TrainState:
        """Return the state after one more step."""
        return dataclasses.replace(
            self,
            iteration=self.iteration + 1,
            consumed_train_samples=self.consumed_train_samples + result.num_samples,
            skipped_train_samples=self.skipped_train_samples
            + result.num_samples * result.was_passed_over,
            flops_so_far=self.flops_so_far + result.flops,
        )

    def skips_iteration(self, iteration: int) -> bool:
        """Return whether an earlier rollback skips the samples of an iteration."""
        return any(first <= iteration <= last for first, last in self.rolled_back)

    def evaluated(self, num_samples: int) -> TrainState:
        """Return the state after an evaluation of `num_samples` samples."""
        return dataclasses.replace(
            self, consumed_valid_samples=self.consumed_valid_samples + num_samples
        )
