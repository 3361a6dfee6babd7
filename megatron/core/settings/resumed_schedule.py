"""Compare the schedule of a run with the schedule in the checkpoint that it resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.foundation.errors import ConfigError

FLAGS = {
    "init_lr": "--lr-warmup-init",
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_steps": "--lr-decay-iters",
    "lr_decay_style": "--lr-decay-style",
    "wsd_decay_steps": "--lr-wsd-decay-iters",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_steps": "--train-iters",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""Field of a schedule that a checkpoint contains -> its flag."""

SCHEDULED_IN_GROUPS = ("max_lr", "min_lr", "lr_mult", "start_wd", "end_wd", "wd_mult")
"""Settings that a parameter group may override."""

_IN_SAMPLES = ("lr_warmup_steps", "lr_decay_steps", "wsd_decay_steps", "wd_incr_steps")
_SIDES = ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler")
_RULE = "a resumed run continues the same schedule unless a flag chooses another one"
_CHOOSE = f"keep this run's schedule with {_SIDES[0]}, or the checkpoint's with {_SIDES[1]}"


def differences_of_schedule(
    schedule: object, stored: Mapping[str, object]
) -> Iterator[ConfigError]:
    """Yield an error for each difference; its fix gives the flag's value, in the flag's unit.

    Args:
        schedule: an `OptimizerParamScheduler`.
        stored: the checkpoint's value of each field of `FLAGS`.
    """
    for name, there in stored.items():
        here = getattr(schedule, name)
        was_constant = stored["wd_incr_style"] == "constant"
        if here == there or (name == "end_wd" and was_constant and there == stored["start_wd"]):
            continue
        flag, fix = _flag_and_fix(schedule, name, there)
        if name == "start_wd" and was_constant:
            flag, fix = "--weight-decay", f"use --weight-decay {there}, without another end"
        unit = " samples" if name in _IN_SAMPLES else ""
        yield ConfigError(
            f"the checkpoint was trained with {name}={there}{unit}, this run has {here}{unit}.",
            rule=_RULE,
            flags=[flag, *_SIDES],
            fix=f"{fix}; or {_CHOOSE}" if fix else _CHOOSE,
        )


def _flag_and_fix(schedule: Any, name: str, there: Any) -> tuple[str, str]:
    """Return the flag of a field, and how to give it the stored value if a flag can."""
    flag = FLAGS[name]
    if name not in _IN_SAMPLES:
        return flag, f"use {flag} {there}"
    batch = schedule.samples_per_iteration
    if batch is None:
        flag, batch = flag.replace("-iters", "-samples"), 1
    if name == "wd_incr_steps":
        return flag, ""  # Weight decay changes until the end, and a resumed run may be longer.
    if there is None:
        return flag, f"drop {flag}"
    if there % batch:
        return flag, ""
    value = f"use {flag} {there // batch}"
    return flag, value + (", without --lr-warmup-fraction" if name == "lr_warmup_steps" else "")


def differences_of_groups(
    schedule: Any, stored: Mapping[str, object], own_groups: Sequence[Mapping[str, object]]
) -> list[ConfigError]:
    """Return an error for each setting of a parameter group that differs from the checkpoint.

    Differences of the whole schedule are left to `differences_of_schedule`.

    Args:
        own_groups: this run's settings. The optimizer's groups already have the checkpoint's.
    """
    found: dict[str, ConfigError] = {}
    for group, own in zip(schedule.optimizer.param_groups, own_groups, strict=False):
        for name in SCHEDULED_IN_GROUPS:
            here, there = own.get(name), group.get(name)
            is_shared = name in stored and (here, there) == (getattr(schedule, name), stored[name])
            if here == there or is_shared:
                continue
            flag, fix = "--param-rules", "give the --param-rules of the run that saved it"
            if own.get("is_decoupled_lr") and name in ("max_lr", "min_lr"):
                flag = "--decoupled-lr" if name == "max_lr" else "--decoupled-min-lr"
                fix = f"use {flag} {there}"
            error = ConfigError(
                f"the checkpoint was trained with {name}={there} for a group of parameters, this"
                f" run has {here}.",
                rule=_RULE,
                flags=[flag, *_SIDES],
                fix=f"{fix}; or {_CHOOSE}",
            )
            found.setdefault(error.found, error)
    return list(found.values())
