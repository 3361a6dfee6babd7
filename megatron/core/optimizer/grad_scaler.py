"""Loss scaling: a factor on the loss keeps fp16 gradients in range.

P. Micikevicius et al., "Mixed Precision Training", section 3.2, arXiv 1710.03740.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from megatron.core.foundation.errors import CheckpointError, ConfigError, NumericsError


class ConstantGradScaler:
    """A factor that never changes."""

    def __init__(self, scale: float) -> None:
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        """Factor on the loss."""
        return self._scale

    @property
    def inv_scale(self) -> float:
        """Factor on the gradients, 1 / scale."""
        return 1.0 / self._scale

    def update(self, found_inf: bool, where: str = "") -> None:
        """Update the scale after a step.

        Args:
            found_inf: whether the gradients overflowed; where: in which parameter.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue where `state_dict` stopped."""


class DynamicGradScaler(ConstantGradScaler):
    """A factor that grows after `growth_interval` good steps in a row and shrinks on overflow.

    Hysteresis: the first `hysteresis - 1` overflows after a growth only skip their step.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        floor_policy: str = "warn",
    ) -> None:
        if not 0 < min_scale <= initial_scale:
            raise ConfigError(
                f"the loss scale begins at {initial_scale} and may fall to {min_scale}.",
                rule="0 < min_loss_scale <= initial_loss_scale",
                flags=["--initial-loss-scale", "--min-loss-scale"],
                fix="use the defaults, 2**32 and 1.0",
            )
        if not growth_factor > 1 > backoff_factor > 0:
            raise ConfigError(
                f"growth_factor={growth_factor}, backoff_factor={backoff_factor}.",
                rule="a loss scale grows by a factor above 1 and falls by one between 0 and 1",
                fix="use the defaults, 2.0 and 0.5",
            )
        super().__init__(initial_scale)
        self.min_scale = float(min_scale)
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = int(growth_interval), hysteresis
        self.floor_policy = floor_policy
        self._num_good_steps = 0
        self._tolerance = hysteresis

    def update(self, found_inf: bool, where: str = "") -> None:
        """Shrink or grow.

        Raises:
            NumericsError: overflow with the scale at its floor, under the policy "raise".
        """
        if found_inf:
            self._num_good_steps = 0
            self._tolerance -= 1
            if self._tolerance <= 0:
                if self._scale <= self.min_scale:
                    self._complain(where)
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._num_good_steps += 1
        if self._num_good_steps == self.growth_interval:
            self._num_good_steps = 0
            self._tolerance = self.hysteresis
            self._scale *= self.growth_factor

    def _complain(self, where: str) -> None:
        problem = NumericsError(
            f"fp16 gradients overflow with the loss scale at its floor {self.min_scale:g}"
            + (f": {where}" if where else "."),
            rule="a step whose gradients are not finite is skipped",
            flags=["--min-loss-scale", "--on-loss-scale-floor", "--bf16"],
            fix="train in bf16, lower the learning rate, or lower --min-loss-scale",
        )
        if self.floor_policy == "raise":
            raise problem
        if self.floor_policy == "warn":
            warnings.warn(str(problem), RuntimeWarning, stacklevel=3)

    def state_dict(self) -> dict[str, Any]:
        """Return scale, good steps in a row, and overflows still tolerated."""
        return {
            "scale": self._scale,
            "growth_tracker": self._num_good_steps,
            "hysteresis_tracker": self._tolerance,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` stopped."""
        scale = float(state_dict["scale"])
        if not (math.isfinite(scale) and scale > 0):
            raise CheckpointError(
                f"the stored loss scale is {scale}.", rule="a loss scale is positive and finite"
            )
        self._scale = scale
        self._num_good_steps = int(state_dict["growth_tracker"])
        self._tolerance = int(state_dict["hysteresis_tracker"])
