"""The dynamic loss scale follows its rule: window, hysteresis, floor."""

import warnings

import pytest

from megatron.core.foundation.errors import NumericsError
from megatron.core.optimizer import DynamicGradScaler


def scales(overflows, **settings):
    scaler = DynamicGradScaler(**({"initial_scale": 16.0, "min_scale": 1.0} | settings))
    seen = []
    for found_inf in overflows:
        scaler.update(bool(found_inf))
        seen.append(scaler.scale)
    return seen


def test_it_doubles_after_a_window_of_good_steps():
    assert scales([0, 0, 0, 0, 0], growth_interval=2) == [16, 32, 32, 64, 64]


def test_an_overflow_begins_the_window_anew():
    assert scales([0, 1, 0, 0], growth_interval=2, hysteresis=2) == [16, 16, 16, 32]


def test_hysteresis_tolerates_overflows_and_is_refilled_by_growth():
    assert scales([1, 1, 1, 0, 0, 1, 1], growth_interval=2, hysteresis=2) == [
        16, 8, 4, 4, 8, 8, 4,
    ]  # fmt: skip


def test_the_floor_is_never_passed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert scales([1] * 6, hysteresis=1, min_scale=4.0) == [8, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("policy", ["raise", "warn", "skip"])
def test_overflow_at_the_floor_follows_the_policy(policy):
    scaler = DynamicGradScaler(1.0, 1.0, hysteresis=1, floor_policy=policy)
    if policy == "raise":
        with pytest.raises(NumericsError, match="floor"):
            scaler.update(True)
    elif policy == "warn":
        with pytest.warns(RuntimeWarning, match="floor"):
            scaler.update(True)
    else:
        scaler.update(True)
    assert scaler.scale == 1.0
