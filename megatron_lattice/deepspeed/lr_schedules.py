"""DeepSpeed's five learning-rate schedules, stepped once per optimizer step.

A schedule is a function of the number of steps taken. Cycles: L. N. Smith, "Cyclical
Learning Rates for Training Neural Networks", section 3, arXiv 1506.01186. Range test: ibid.,
section 3.3. Cosine: "SGDR", section 3, arXiv 1608.03983.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer_param_scheduler import HasParamGroups


class Schedule:
    """Sets the learning rate of an optimizer's groups from the number of steps taken."""

    def __init__(self, optimizer: HasParamGroups, last_batch_iteration: int = -1) -> None:
        """
        Args:
            optimizer: anything with `param_groups`.
            last_batch_iteration: number of the last step; -1 before the first step.
        """
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group at a step; -1 is before the first step."""
        raise NotImplementedError

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to the given step, and set the rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(
            self.param_groups, self.rates(self.last_batch_iteration), strict=True
        ):
            group["lr"] = rate

    def get_lr(self) -> list[float]:
        """Return the rates that are set."""
        return [group["lr"] for group in self.param_groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the number of the last step, and the rates."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._apply()

    def _per_group(self, value: float | Sequence[float]) -> list[float]:
        """Return one value per group; a single value applies to all groups."""
        if isinstance(value, (int, float)):
            return [float(value)] * len(self.param_groups)
        if len(value) != len(self.param_groups):
            raise ConfigError(
                f"{len(value)} values in a schedule for {len(self.param_groups)} groups of"
                " parameters.",
                rule="a list in scheduler.params has one value for each group",
                flags=["scheduler.params"],
                fix="write one number for all groups",
            )
        return [float(each) for each in value]


class WarmupLR(Schedule):
    """Rise from `warmup_min_lr` to `warmup_max_lr` (default: the optimizer's rate); then hold."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        own = [group["lr"] for group in self.param_groups]
        self.max_lrs = own if warmup_max_lr is None else self._per_group(warmup_max_lr)
        self.min_lrs = self._per_group(warmup_min_lr)
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def _warmed(self, step: int) -> float:
        """Return the progress of the warm-up, 0 to 1."""
        if step >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "log":
            return math.log(max(step, 0) + 1) / math.log(self.warmup_num_steps)
        return max(step, 0) / self.warmup_num_steps

    def _part(self, step: int) -> float:
        return self._warmed(step)

    def rates(self, step: int) -> list[float]:
        part = self._part(step)
        return [
            low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]


class WarmupDecayLR(WarmupLR):
    """Rise, then fall back in a straight line until `total_num_steps`."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type,
            last_batch_iteration,
        )  # fmt: skip

    def _part(self, step: int) -> float:
        if step < self.warmup_num_steps:
            return self._warmed(step)
        length = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - step) / length)


class WarmupCosineLR(WarmupLR):
    """Rise to the optimizer's own rate, then fall along half a cosine to `cos_min_ratio` of it."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps, self.cos_min_ratio = total_num_steps, cos_min_ratio
        self.warmup_min_ratio = warmup_min_ratio
        super().__init__(optimizer, 0.0, None, warmup_num_steps, warmup_type, last_batch_iteration)

    def _part(self, step: int) -> float:
        if step < 0:
            return 0.0
        if step < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._warmed(step)
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        done = min(1.0, (step - self.warmup_num_steps + 1) / length)
        left = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * left


class OneCycle(Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and back, momentum the other way; then decay."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.low, self.high, self.decay_lr_rate = cycle_min_lr, cycle_max_lr, decay_lr_rate
        self.first = cycle_first_step_size
        self.second = cycle_second_step_size or cycle_first_step_size
        second_stairs = cycle_second_stair_count
        self.stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if second_stairs is None else second_stairs,
        )
        self.decay_step_size, self.decay_mom_rate = decay_step_size, decay_mom_rate
        self.momenta = (cycle_min_mom, cycle_max_mom) if cycle_momentum else None
        super().__init__(optimizer, last_batch_iteration)

    def _height(self, taken: int) -> float:
        """Return the position between low (0) and high (1) after a number of steps of the cycle."""
        if taken <= self.first:
            height, stairs = taken / self.first, self.stairs[0]
        else:
            height, stairs = (self.first + self.second - taken) / self.second, self.stairs[1]
        return math.floor(height * stairs + 1e-9) / stairs if stairs else height

    def _decays(self, taken: int) -> float:
        """Return the number of decay intervals since the end of the cycle."""
        after = taken - self.first - self.second
        return after / self.decay_step_size if after > 0 and self.decay_step_size else 0.0

    def rates(self, step: int) -> list[float]:
        taken = step + 1
        if taken > self.first + self.second:
            rate = self.low / (1.0 + self.decay_lr_rate * self._decays(taken))
        else:
            rate = self.low + (self.high - self.low) * self._height(taken)
        return [rate] * len(self.param_groups)

    def momentum(self, step: int) -> float | None:
        """Return the momentum at a step; None if it is not cycled."""
        if self.momenta is None:
            return None
        low, high = self.momenta
        taken = step + 1
        if taken == 0:
            return low
        if taken > self.first + self.second:
            return high * (1.0 + self.decay_mom_rate * self._decays(taken))
        return high - (high - low) * self._height(taken)

    def _apply(self) -> None:
        super()._apply()
        momentum = self.momentum(self.last_batch_iteration)
        for group in self.param_groups if momentum is not None else ():
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            elif "momentum" in group:
                group["momentum"] = momentum


class LRRangeTest(Schedule):
    """Raise the rate without limit, to find the rate that makes training diverge."""

    def __init__(
        self,
        optimizer: HasParamGroups,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lrs = self._per_group(lr_range_test_min_lr)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.is_staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        intervals = (step + 1) / self.step_size
        if self.is_staircase:
            intervals = math.floor(intervals)
        return [low * (1.0 + self.step_rate * intervals) for low in self.min_lrs]


BY_NAME: Mapping[str, Callable[..., Schedule]] = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""scheduler.type -> class."""


def params_of_schedule(name: str) -> list[inspect.Parameter]:
    """Return the params of a schedule in a configuration: all arguments but the optimizer."""
    return list(inspect.signature(BY_NAME[name]).parameters.values())[1:]
