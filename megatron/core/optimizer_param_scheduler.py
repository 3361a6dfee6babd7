"""Learning rate and weight decay over the course of training, counted in samples.

Rates and decays are functions of the number of samples seen, so a resumed run, and a run with
another batch size ramp, get the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
        """Return the current learning rate of a group, before its `lr_mult`.

        Warm-up is linear from `init_lr`. Cosine: "SGDR", section 3, arXiv 1608.03983. Inverse
        square root: "Attention Is All You Need", section 5.3, arXiv 1706.03762. WSD (warm-up,
        stable, decay): "MiniCPM", section 4, arXiv 2404.06395.
        """
        max_lr: float = param_group.get("max_lr", self.max_lr)
        min_lr: float = param_group.get("min_lr", self.min_lr)
        seen, num_warmup = self.num_steps, self.lr_warmup_steps
        if num_warmup > 0 and seen <= num_warmup:
            return self.init_lr + (max_lr - self.init_lr) * seen / num_warmup
        if self.lr_decay_style == "constant":
            return max_lr
        if seen > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(num_warmup, 1)) / math.sqrt(max(seen, 1)))
        style, begin = self.lr_decay_style, num_warmup
        if style == "WSD":
            style = self.lr_wsd_decay_style or "exponential"
            begin = self.lr_decay_steps - (self.wsd_decay_steps or 0)
        part_left = 1.0
        if seen > begin:
            part_left = _DECAYS[style]((seen - begin) / (self.lr_decay_steps - begin))
        return min_lr + part_left * (max_lr - min_lr)

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """Return the current weight decay of a group, before its `wd_mult`.

        It rises from `start_wd` to `end_wd`, then stays.
        """
        group = param_group or {}
        start: float = group.get("start_wd", self.start_wd)
        end: float = group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return end
        part = self.num_steps / max(self.wd_incr_steps, 1)
        if self.wd_incr_style == "cosine":
            part = 0.5 * (math.cos(math.pi * (1.0 - part)) + 1.0)
        return start + part * (end - start)

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
