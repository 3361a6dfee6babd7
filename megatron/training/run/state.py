"""The result of a step, and the state of a run besides weights and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar


class RanksChange(Exception):
    """All ranks leave after a step, because other ranks wait to join."""


class RollbackNeeded(Exception):
    """All ranks refuse a step, for the reason given, and return to an earlier state."""


class StopReason(Enum):
    """Why the loop ended."""

    FINISHED = "all steps are done"
    EXIT_INTERVAL = "--exit-interval"
    PHASE_END = "--phase-transition-iterations"
    EXIT_DURATION = "--exit-duration-in-mins"
    EXIT_SIGNAL = "a signal"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did."""

    losses: Mapping[str, float]
    """Token means over the global batch, by name; empty except on the last pipeline stage."""
    grad_norm: float | None
    num_zeros: float | None
    learning_rate: float
    """Rate that this step used."""
    decoupled_learning_rate: float | None
    loss_scale: float
    num_samples: int
    """Global batch size of the step."""
    num_microbatches: int
    was_skipped: bool
    """The weights did not change: overflow under fp16, or --iterations-to-skip."""
    skip_reason: str | None = None
    """What was wrong, where that is why the step was skipped: a gradient that overflowed, a loss or
    gradient norm far above the recent ones."""
    was_passed_over: bool = False
    """Its samples were taken, and nothing was computed from them."""
    was_nan: bool = False
    """A loss was not finite and the check was switched off."""
    max_attention_logit: float | None = None
    """Of all heads and layers, where --log-max-attention-logit asks for it."""
    num_tokens: int = 0
    """Of the global batch."""
    flops: float = 0.0
    """Of all ranks together."""

    is_read: ClassVar[bool] = True

    def read(self) -> StepResult:
        """Return the result itself; see `AsyncStepResult.read`."""
        return self


class AsyncStepResult:
    """A future of `StepResult`: losses, norm and success of the step are still on the device.

    All ranks call `read` together, because figures are summed over ranks.

    Args:
        read: reads the device.
        num_samples, num_tokens, flops: of the step, see `StepResult`.
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
        """Return what the step did.

        Raises:
            NumericsError: on all ranks; a loss or a gradient of this step was not finite.
        """
        if self._result is None:
            self._result = self._read()
        return self._result


TakenStep = StepResult | AsyncStepResult
"""What `train_step` returns: a value, or a future of it."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Counters of a run, all of them global."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    flops_so_far: float = 0.0
    data_order: Mapping[str, Any] | None = None
    """What the order of the training samples follows from; None if the data do not tell."""
    recent_values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Losses and gradient norms of the last steps, where spikes are answered before the update."""
    rolled_back: tuple[tuple[int, int], ...] = ()
    """(first, last) iteration that is passed over, for every time that the run returned to an
    earlier state; in this order."""

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
        """Return whether an earlier roll-back skips the samples of an iteration."""
        return any(first <= iteration <= last for first, last in self.rolled_back)

    def evaluated(self, num_samples: int) -> TrainState:
        """Return the state after an evaluation of `num_samples` samples."""
        return dataclasses.replace(
            self, consumed_valid_samples=self.consumed_valid_samples + num_samples
        )
