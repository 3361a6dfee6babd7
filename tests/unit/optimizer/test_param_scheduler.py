"""Learning-rate and weight-decay curves, and their resume."""

import math
from types import SimpleNamespace

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer_param_scheduler import (
    LR_DECAY_STYLES,
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)


def scheduler(groups=None, **changes):
    optimizer = SimpleNamespace(param_groups=groups or [{"lr_mult": 1.0, "wd_mult": 1.0}])
    settings = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 110,
        "lr_decay_style": "cosine",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 110,
        "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False,
    }
    return OptimizerParamScheduler(optimizer, **(settings | changes))


def lr_at(samples, **changes):
    made = scheduler(**changes)
    made.step(samples)
    return made.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("style", LR_DECAY_STYLES)
def test_every_style_warms_up_linearly(style):
    wsd = {"wsd_decay_steps": 20, "lr_wsd_decay_style": "linear"}
    for samples in range(11):
        assert lr_at(samples, lr_decay_style=style, **wsd) == pytest.approx(samples / 10)
    assert lr_at(5, lr_decay_style=style, init_lr=0.5, **wsd) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 1000, 1.0),
        ("linear", 60, 0.55),
        ("linear", 111, 0.1),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 110, 0.1),
        ("cosine", 5000, 0.1),
        ("inverse-square-root", 40, 0.5),
        ("inverse-square-root", 90, 1 / 3),
        ("inverse-square-root", 111, 0.1),
    ],
)
def test_decay_has_the_textbook_values(style, samples, expected):
    assert lr_at(samples, lr_decay_style=style) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "half_way"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_is_stable_and_then_decays_in_its_style(style, half_way):
    wsd = {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": style}
    assert lr_at(11, **wsd) == lr_at(90, **wsd) == 1.0
    assert lr_at(100, **wsd) == pytest.approx(0.1 + 0.9 * half_way)
    assert lr_at(110, **wsd) == pytest.approx(0.1)


def test_weight_decay_ramps():
    ramp = {"start_wd": 0.0, "end_wd": 1.0, "wd_incr_steps": 100}
    for style, quarter in (("linear", 0.25), ("cosine", 0.5 * (math.cos(0.75 * math.pi) + 1))):
        made = scheduler(wd_incr_style=style, **ramp)
        made.step(25)
        assert made.get_wd() == pytest.approx(quarter)
        made.step(1000)
        assert made.get_wd() == 1.0


def test_groups_have_their_own_rates_and_factors():
    groups = [{"lr_mult": 2.0, "wd_mult": 0.0}, {"max_lr": 3.0, "min_lr": 3.0}]
    scheduler(groups, lr_decay_style="linear").step(60)
    assert groups[0]["lr"] == pytest.approx(1.1) and groups[0]["weight_decay"] == 0.0
    assert groups[1]["lr"] == pytest.approx(3.0) and groups[1]["weight_decay"] == 0.1


def test_it_goes_on_where_it_stopped():
    whole, first = scheduler(), scheduler()
    whole.step(7)
    whole.step(50)
    first.step(7)
    resumed = scheduler()
    resumed.load_state_dict(first.state_dict())
    resumed.step(50)
    assert resumed.optimizer.param_groups == whole.optimizer.param_groups


def test_a_changed_schedule_is_refused_with_both_values_unless_a_side_is_chosen():
    stored = scheduler(max_lr=2.0, lr_decay_steps=220).state_dict()
    with pytest.raises(ConfigError) as raised:
        scheduler().load_state_dict(stored)
    assert "2 problems" in str(raised.value) and "max_lr=2.0, this run has 1.0" in str(raised.value)
    ours = scheduler(override_opt_param_scheduler=True)
    ours.load_state_dict(stored)
    assert ours.max_lr == 1.0
    theirs = scheduler(use_checkpoint_opt_param_scheduler=True)
    theirs.load_state_dict(stored)
    assert theirs.max_lr == 2.0


def test_all_contradictions_are_reported_together():
    with pytest.raises(ConfigError) as raised:
        scheduler(min_lr=2.0, lr_warmup_steps=200, lr_decay_style="WSD", wd_incr_style="up")
    text = str(raised.value)
    assert "4 problems" in text
    for flag in ("--min-lr", "--lr-warmup-iters", "--lr-wsd-decay-iters", "--weight-decay-incr"):
        assert flag in text


def test_the_logged_rate_is_that_of_ordinary_groups():
    groups = [{"lr": 9.0, "is_decoupled_lr": True}, {"lr": 8.0, "lr_mult": 2.0}, {"lr": 4.0}]
    assert get_canonical_lr_for_logging(groups) == 4.0
    assert get_canonical_lr_for_logging(groups[:2]) is None


@pytest.mark.parametrize(
    ("batch", "stored", "expected"),
    [
        (4, {"lr_decay_steps": 48}, "use --lr-decay-iters 12;"),
        (4, {"lr_warmup_steps": 8}, "use --lr-warmup-iters 2, without --lr-warmup-fraction;"),
        (None, {"lr_decay_steps": 48}, "use --lr-decay-samples 48;"),
        (None, {"lr_warmup_steps": 8}, "use --lr-warmup-samples 8, without"),
        (4, {"max_lr": 3e-5}, "use --lr 3e-05;"),
        (4, {"init_lr": 0.5}, "use --lr-warmup-init 0.5;"),
        (4, {"start_wd": 0.5, "end_wd": 0.5}, "use --weight-decay 0.5, without another end;"),
        (4, {"lr_decay_steps": 50}, "fix:   keep this run's schedule"),  # no whole iterations
        (4, {"wd_incr_steps": 40}, "fix:   keep this run's schedule"),
    ],
)
def test_a_changed_schedule_is_told_in_the_unit_of_the_flag(batch, stored, expected):
    run = scheduler(samples_per_iteration=batch)
    with pytest.raises(ConfigError) as raised:
        run.load_state_dict({**run.state_dict(), **stored})
    assert "1 problem" in str(raised.value)
    assert expected in str(raised.value)


def test_factors_of_groups_are_those_of_the_side_that_was_chosen():
    own, theirs = {"lr_mult": 2.0, "max_lr": 1.0}, {"lr_mult": 0.5, "max_lr": 1.0, "start_wd": 0.0}
    for changes, lr_mult in (
        ({"override_opt_param_scheduler": True}, 2.0),
        ({"use_checkpoint_opt_param_scheduler": True}, 0.5),
    ):
        run = scheduler([dict(theirs)], **changes)
        run.load_state_dict({**run.state_dict(), "num_steps": 10}, [own])
        (group,) = run.optimizer.param_groups
        assert group["lr"] == lr_mult
        assert ("start_wd" in group) == (lr_mult == 0.5)
    run = scheduler([dict(theirs)])
    with pytest.raises(ConfigError, match="lr_mult=0.5 for a group of parameters, this run has 2"):
        run.load_state_dict(run.state_dict(), [own])
