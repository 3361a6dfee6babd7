"""Learning rate and weight decay over the course of training, counted in samples.

Curves are plain functions of the number of samples seen, so a resumed run, a run with another
batch size ramp and a plot all get the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.settings.resumed_schedule import (
    FLAGS,
    SCHEDULED_IN_GROUPS,
    differences_of_groups,
    differences_of_schedule,
)

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WD_INCR_STYLES = ("constant", "linear", "cosine")

# Each maps the completed part of the decay, 0 to 1, to the remaining part of the range.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@dataclass(frozen=True, kw_only=True)
class LearningRateCurve:
    """Learning rate as a function of samples seen. Lengths are in samples.

    Warm-up is linear from `init_lr`. Cosine: "SGDR", section 3, arXiv 1608.03983. Inverse square
    root: "Attention Is All You Need", section 5.3, arXiv 1706.03762. WSD (warm-up, stable, decay):
    "MiniCPM", section 4, arXiv 2404.06395.
    """

    init_lr: float
    max_lr: float
    min_lr: float
    num_warmup: int
    num_decay: int
    """End of the decay, warm-up included."""
    style: str
    num_wsd_decay: int = 0
    """Length of the last phase of WSD."""
    wsd_style: str = "exponential"

    def at(self, num_samples: float) -> float:
        """Return the rate after `num_samples` samples."""
        if self.num_warmup > 0 and num_samples <= self.num_warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * num_samples / self.num_warmup
        if self.style == "constant":
            return self.max_lr
        if num_samples > self.num_decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            warmup, seen = max(self.num_warmup, 1), max(num_samples, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(warmup) / math.sqrt(seen))
        return self.min_lr + self._part_left(num_samples) * (self.max_lr - self.min_lr)

    def _part_left(self, num_samples: float) -> float:
        if self.style == "WSD":
            start = self.num_decay - self.num_wsd_decay
            if num_samples <= start:
                return 1.0
            return _DECAYS[self.wsd_style]((num_samples - start) / self.num_wsd_decay)
        length = self.num_decay - self.num_warmup
        return _DECAYS[self.style]((num_samples - self.num_warmup) / length)


@dataclass(frozen=True, kw_only=True)
class WeightDecayCurve:
    """Weight decay as a function of samples seen: rises from `start` to `end`, then stays."""

    start: float
    end: float
    num_increase: int
    style: str

    def at(self, num_samples: float) -> float:
        """Return the weight decay after `num_samples` samples."""
        if self.style == "constant" or num_samples > self.num_increase:
            return self.end
        done = num_samples / max(self.num_increase, 1)
        part = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
        return self.start + part * (self.end - self.start)


class HasParamGroups(Protocol):
    """The part of an optimizer (ours, torch's or a third party's) that a schedule needs."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups, whose "lr" and "weight_decay" the schedule sets."""
        ...


class OptimizerParamScheduler:
    """Sets learning rate and weight decay of an optimizer's parameter groups.

    A group may have its own `max_lr`, `min_lr`, `start_wd` and `end_wd`, and factors `lr_mult` and
    `wd_mult`.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
        *,
        samples_per_iteration: int | None = None,
    ) -> None:
        """
        Args:
            optimizer: anything with `param_groups`.
            lr_warmup_steps, lr_decay_steps, wd_incr_steps, wsd_decay_steps: in samples.
            use_checkpoint_opt_param_scheduler: a loaded checkpoint's curves replace these.
            override_opt_param_scheduler: these curves replace a loaded checkpoint's. With
                neither, the two must agree.
            samples_per_iteration: given if the flags of lengths count iterations, None if they
                count samples. For messages only.
        Raises:
            ConfigError: all contradictions together.
        """
        self.optimizer = optimizer
        self.init_lr = float(init_lr)
        self.max_lr = float(max_lr)
        self.min_lr = float(min_lr)
        self.lr_warmup_steps = lr_warmup_steps
        self.lr_decay_steps = lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style
        self.use_checkpoint_opt_param_scheduler = bool(use_checkpoint_opt_param_scheduler)
        self.override_opt_param_scheduler = bool(override_opt_param_scheduler)
        self.samples_per_iteration = samples_per_iteration
        self.num_steps = 0
        raise_together(self._check(), summary="the learning-rate and weight-decay schedule")
        self.step(0)

    def _check(self) -> list[MegatronError]:
        problems: list[MegatronError] = []

        def require(holds: bool, found: str, rule: str, flags: list[str], fix: str) -> None:
            if not holds:
                problems.append(ConfigError(found, rule=rule, flags=flags, fix=fix))

        require(
            0.0 <= self.min_lr <= self.max_lr and self.init_lr <= self.max_lr,
            f"min_lr={self.min_lr:g}, max_lr={self.max_lr:g}, init_lr={self.init_lr:g}.",
            "0 <= min-lr <= lr and lr-warmup-init <= lr",
            ["--lr", "--min-lr", "--lr-warmup-init"],
            "raise --lr or lower --min-lr",
        )
        require(
            self.lr_decay_style in LR_DECAY_STYLES,
            f"lr_decay_style={self.lr_decay_style!r}.",
            f"decay styles are {', '.join(LR_DECAY_STYLES)}",
            ["--lr-decay-style"],
            "use cosine",
        )
        require(
            self.lr_decay_steps > 0 and 0 <= self.lr_warmup_steps < self.lr_decay_steps,
            f"warm-up over {self.lr_warmup_steps} and decay over {self.lr_decay_steps} samples.",
            "the warm-up ends before the end of the decay",
            ["--lr-warmup-iters", "--lr-decay-iters"],
            "shorten --lr-warmup-iters or lengthen --lr-decay-iters",
        )
        if self.lr_decay_style == "WSD":
            length = self.wsd_decay_steps
            require(
                length is not None and 0 < length <= self.lr_decay_steps,
                f"WSD with a last phase of {length} samples in {self.lr_decay_steps}.",
                "WSD needs the length of its last phase, at most the length of the decay",
                ["--lr-wsd-decay-iters", "--lr-decay-iters"],
                "set --lr-wsd-decay-iters to about a tenth of --lr-decay-iters",
            )
            require(
                (self.lr_wsd_decay_style or "exponential") in WSD_DECAY_STYLES,
                f"lr_wsd_decay_style={self.lr_wsd_decay_style!r}.",
                f"styles of the last phase are {', '.join(WSD_DECAY_STYLES)}",
                ["--lr-wsd-decay-style"],
                "use exponential",
            )
        require(
            self.wd_incr_style in WD_INCR_STYLES,
            f"wd_incr_style={self.wd_incr_style!r}.",
            f"weight decay changes in the styles {', '.join(WD_INCR_STYLES)}",
            ["--weight-decay-incr-style"],
            "use constant",
        )
        require(
            self.start_wd >= 0.0 and self.end_wd >= self.start_wd,
            f"weight decay from {self.start_wd} to {self.end_wd}.",
            "weight decay is not negative and does not fall",
            ["--start-weight-decay", "--end-weight-decay"],
            "swap the two, or use --weight-decay alone",
        )
        require(
            self.wd_incr_style != "constant" or self.start_wd == self.end_wd,
            f"constant weight decay from {self.start_wd} to {self.end_wd}.",
            "a constant weight decay has one value",
            ["--weight-decay-incr-style", "--start-weight-decay", "--end-weight-decay"],
            "use --weight-decay-incr-style linear",
        )
        return problems

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Return the current learning rate of a group, before its `lr_mult`."""
        curve = LearningRateCurve(
            init_lr=self.init_lr,
            max_lr=param_group.get("max_lr", self.max_lr),
            min_lr=param_group.get("min_lr", self.min_lr),
            num_warmup=self.lr_warmup_steps,
            num_decay=self.lr_decay_steps,
            style=self.lr_decay_style,
            num_wsd_decay=self.wsd_decay_steps or 0,
            wsd_style=self.lr_wsd_decay_style or "exponential",
        )
        return curve.at(self.num_steps)

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """Return the current weight decay of a group, before its `wd_mult`."""
        group = param_group or {}
        curve = WeightDecayCurve(
            start=group.get("start_wd", self.start_wd),
            end=group.get("end_wd", self.end_wd),
            num_increase=self.wd_incr_steps,
            style=self.wd_incr_style,
        )
        return curve.at(self.num_steps)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and set all groups."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the curves and the number of samples."""
        return {name: getattr(self, name) for name in (*FLAGS, "num_steps")}

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        own_groups: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Continue from a checkpoint's number of samples, on its curves or on these.

        Args:
            own_groups: the settings of this run's parameter groups, if a checkpoint's settings have
                replaced them in the optimizer. Their rates, decays and factors belong to the
                curves.
        Raises:
            ConfigError: the curves differ, and no argument chooses between them.
        """
        # `init_lr` and names of old versions may be absent.
        stored = {name: state_dict.get(name, getattr(self, name)) for name in FLAGS}
        takes_stored = self.use_checkpoint_opt_param_scheduler
        if self.override_opt_param_scheduler:
            takes_stored = False
        elif not takes_stored:
            differences = [
                *differences_of_schedule(self, stored),
                *differences_of_groups(self, stored, own_groups or ()),
            ]
            raise_together(differences, summary="the schedule of the checkpoint")
        if takes_stored:
            for name, value in stored.items():
                setattr(self, name, value)
        elif own_groups is not None:
            for group, own in zip(self.optimizer.param_groups, own_groups, strict=True):
                for name in SCHEDULED_IN_GROUPS:
                    group.pop(name, None)
                group.update({n: v for n, v in own.items() if n in SCHEDULED_IN_GROUPS})
        self.num_steps = 0
        self.step(int(state_dict["num_steps"]))


def get_canonical_lr_for_logging(param_groups: list[dict[str, Any]]) -> float | None:
    """Return the learning rate to log: the rate of the first group without its own rate."""
    for group in param_groups:
        if not group.get("is_decoupled_lr", False) and group.get("lr_mult", 1.0) == 1.0:
            return group["lr"]
    return None
