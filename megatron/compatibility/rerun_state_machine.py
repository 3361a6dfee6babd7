"""Megatron's `rerun_state_machine`, for scripts with their own loop: it validates each result once.

No step is computed a second time; `pretrain` does that itself (`megatron.resilience.rerun`).
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from megatron.core.foundation.errors import ConfigError, NumericsError
from megatron.resilience.rerun import RerunDataIterator


class RerunMode(enum.StrEnum):
    """Whether results are computed again; only `DISABLED` is supported."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_stats"


class RerunErrorInjector:
    """Megatron's injector of errors into results; only the rate 0 is supported."""

    def __init__(self, error_injection_rate: int = 0, error_injection_type: object = None) -> None:
        if error_injection_rate:
            raise ConfigError(
                f"error_injection_rate={error_injection_rate} is not supported.",
                rule="RerunErrorInjector injects no errors into results",
                flags=["--error-injection-rate"],
                fix="use 0",
            )


class RerunStateMachine:
    """Validates results, each of them once.

    Raises:
        ConfigError: `mode` is not `DISABLED`.
    """

    def __init__(self, mode: RerunMode | str = RerunMode.DISABLED, **_: object) -> None:
        self.set_mode(mode)
        self.current_iteration = -1
        self._is_running = False
        self._largest: dict[str, tuple[int, float]] = {}

    def get_mode(self) -> RerunMode:
        """Return `DISABLED`."""
        return RerunMode.DISABLED

    def set_mode(self, mode: RerunMode | str) -> None:
        """Accept `DISABLED`, which evaluation sets.

        Raises:
            ConfigError: another mode.
        """
        if RerunMode(mode) is not RerunMode.DISABLED:
            raise ConfigError(
                f"rerun mode {RerunMode(mode).value!r} is not supported.",
                rule="results are validated; no step is computed a second time",
                flags=["--rerun-mode"],
                fix="use --rerun-mode disabled",
            )

    def should_run_forward_backward(self, data_iterator: object = None) -> bool:
        """Return True and False in turn: a `while` loop over it runs its body once a step."""
        self._is_running = not self._is_running
        if self._is_running:
            self.current_iteration += 1
        else:
            for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
                if isinstance(iterator, RerunDataIterator):
                    iterator.advance()
        return self._is_running

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return (False, False, 0): the run continues."""
        return False, False, 0

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[object], object],
        message: str = "unexpected result",
        comparison_func: object = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Call `rejection_func` on a result, and warn if it returns True.

        Raises:
            NumericsError: the result is rejected, and `fatal` is set.
        """
        if not bool(rejection_func(result)):
            return
        found = f"{message}: {getattr(result, 'tolist', lambda: result)()!r}"
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
        """Return whether a result is above `threshold` times the largest of the first results.

        Args:
            context: name of the quantity; each has its own largest value.
            num_samples: number of first results, for which the method returns False.
            resample: forget the earlier results.
        """
        value = float(result)
        count, largest = (0, 0.0) if resample else self._largest.get(context, (0, 0.0))
        if count < num_samples:
            self._largest[context] = count + 1, max(largest, value)
            return False
        return value >= largest * threshold

    def state_dict(self, *_: object, force: bool = False, **__: object) -> dict[str, Any] | None:
        """Return the mode with `force`, otherwise None: the machine has no state to save."""
        return {"mode": RerunMode.DISABLED.value} if force else None

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Do nothing: the machine has no state."""

    def validate_state_dict(self, state_dict: object) -> bool:
        """Return whether the state is not empty."""
        return bool(state_dict)


@cache
def get_rerun_state_machine() -> RerunStateMachine:
    """Return the machine of this process; the first call creates it."""
    return RerunStateMachine()


destroy_rerun_state_machine = get_rerun_state_machine.cache_clear


def initialize_rerun_state_machine(**options: Any) -> None:
    """Start with a new machine; options are the arguments of `RerunStateMachine`."""
    RerunStateMachine(**options)  # refuses unsupported options; no option changes the machine
    destroy_rerun_state_machine()
