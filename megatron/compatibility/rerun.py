"""Megatron's machine that runs a step again, for scripts with a loop of their own: switched off.

Results are validated and never computed again; the loop of `pretrain` does that
(`megatron.resilience.rerun`). A result that is not accepted ends the run if it is fatal, and is
reported otherwise.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron.compatibility.state import STATE
from megatron.core.foundation.errors import ConfigError, NumericsError
from megatron.resilience.rerun import RerunDataIterator
from megatron.resilience.rerun_verdict import RerunDiagnostic


class RerunMode(enum.StrEnum):
    """What is done about results; only `DISABLED` exists here."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_stats"


class RerunState(enum.Enum):
    """Where a machine is; without reruns always the first."""

    NOT_RUNNING_YET = 0
    INITIAL_RUN = 1
    RERUNNING_IN_PLACE = 2
    WILL_RERUN_FROM_CHECKPOINT = 3
    RERUNNING_FROM_CHECKPOINT = 4
    RERUNNING_AGAIN_FROM_CHECKPOINT = 5


class RerunValidationStatus(enum.StrEnum):
    """What came of one validation."""

    RERUN_DISABLED = "rerun_disabled"
    INITIAL_RUN = "initial_run"
    FIRST_RERUN_NOT_REPRODUCIBLE = "first_rerun_not_reproducible"
    FIRST_RERUN_REPRODUCIBLE = "first_rerun_reproducible"
    SECOND_RERUN_NOT_REPRODUCIBLE = "second_rerun_not_reproducible"
    SECOND_RERUN_REPRODUCIBLE = "second_rerun_reproducible"


class RerunErrorInjector:
    """Puts wrong results among right ones; at rate 0, which is all there is, it does nothing."""

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic = RerunDiagnostic.TRANSIENT_ERROR,
    ) -> None:
        if error_injection_rate:
            raise ConfigError(
                f"error_injection_rate={error_injection_rate} is not supported.",
                rule="no errors are injected into results",
                flags=["--error-injection-rate"],
                fix="use 0",
            )
        self.error_injection_rate = 0
        self.error_injection_type = error_injection_type


class RerunStateMachine:
    """Validates results, each of them once.

    Args:
        mode: `DISABLED`; the others are refused.
    """

    def __init__(
        self,
        state_save_func: Callable[[], object] | None = None,
        state_restore_func: Callable[[object], None] | None = None,
        mode: RerunMode | str = RerunMode.DISABLED,
        error_injector: RerunErrorInjector | None = None,
        result_rejected_tracker_filename: str | None = None,
    ) -> None:
        self.error_injector = error_injector or RerunErrorInjector()
        self.state = RerunState.NOT_RUNNING_YET
        self.current_iteration = -1
        self._step_was_run = False
        self._largest: dict[str, tuple[int, float]] = {}
        self.set_mode(mode)

    def set_mode(self, mode: RerunMode | str) -> None:
        """Accept `DISABLED`.

        Raises:
            ConfigError: for the other modes.
        """
        if RerunMode(mode) is not RerunMode.DISABLED:
            raise ConfigError(
                f"rerun mode {RerunMode(mode).value!r} is not supported.",
                rule="results are validated; no step is computed a second time",
                flags=["--rerun-mode"],
                fix="use --rerun-mode disabled",
            )
        self.mode = RerunMode.DISABLED

    def get_mode(self) -> RerunMode:
        """Return `DISABLED`."""
        return self.mode

    def should_run_forward_backward(self, data_iterator: object = None) -> bool:
        """Return True and False in turn: a loop over it runs its body once a step."""
        self._step_was_run = not self._step_was_run
        if self._step_was_run:
            self.current_iteration += 1
        else:
            for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
                if isinstance(iterator, RerunDataIterator):
                    iterator.advance()
        return self._step_was_run

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return (False, False, 0): a rerun never asks for the end of the run."""
        return False, False, 0

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[object], object],
        message: str = "unexpected result",
        comparison_func: Callable[[object, object], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Ask `rejection_func` whether a result is wrong.

        Raises:
            NumericsError: it is, and that is fatal. Otherwise it is a warning.
        """
        if not bool(rejection_func(result)):
            return
        found = f"{message}: {float(result) if _is_number(result) else result!r}"
        if not fatal:
            warnings.warn(found, stacklevel=2)
            return
        raise NumericsError(
            f"{found}.",
            rule="the script's check rejected the result; it is not computed again",
            flags=["--check-for-nan-in-loss-and-grad", "--check-for-spiky-loss"],
            fix="lower the learning rate, look at the data of this step, or resume from an earlier"
            " checkpoint",
        )

    def is_unexpectedly_large(
        self,
        result: Any,
        threshold: float,
        context: str,
        num_samples: int = 100,
        resample: bool = False,
    ) -> bool:
        """Return whether a result is above `threshold` times the largest of the first ones.

        Args:
            context: what is measured; each has a largest value of its own.
            num_samples: results that the largest one is taken from; until then the answer is False.
            resample: begin anew.
        """
        value = float(result)
        if resample:
            self._largest.pop(context, None)
        count, largest = self._largest.get(context, (0, 0.0))
        if count < num_samples:
            self._largest[context] = count + 1, max(largest, value)
            return False
        return value >= largest * threshold

    def state_dict(
        self, data_iterator: object = None, ckpt_format: str = "torch_dist", force: bool = False
    ) -> dict[str, Any] | None:
        """Return the mode, or None unless forced: there is nothing to continue from."""
        return {"mode": self.mode.value} if force else None

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Do nothing: a run continues without reruns."""

    def validate_state_dict(self, state_dict: object) -> bool:
        """Return whether there is anything to load."""
        return bool(state_dict)


def _is_number(result: Any) -> bool:
    return isinstance(result, int | float) or (
        isinstance(result, torch.Tensor) and result.numel() == 1
    )


def initialize_rerun_state_machine(**options: Any) -> None:
    """Create the machine of this process; options are those of `RerunStateMachine`."""
    STATE.rerun_machine = RerunStateMachine(**options)


def get_rerun_state_machine() -> RerunStateMachine:
    """Return the machine of this process, and make it if there is none."""
    if STATE.rerun_machine is None:
        STATE.rerun_machine = RerunStateMachine()
    machine: RerunStateMachine = STATE.rerun_machine
    return machine


def destroy_rerun_state_machine() -> None:
    """Forget the machine of this process."""
    STATE.rerun_machine = None
