"""What a step's time went into, from waits that are counted by a clock under control."""

import time

import pytest

from megatron.core.foundation.flight_recorder import PEERS, Channel, Waits
from megatron.training.hooks.times import PARTS, IntervalTimes, StepClock, shares_of


class Clock:
    """Stands in for the clocks of `time`."""

    def __init__(self, monkeypatch) -> None:
        self.now = self.cpu = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "thread_time", lambda: self.cpu)

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds

    def wait(self, waits: Waits, number: int, seconds: float) -> None:
        waits.switch(number)
        self.now += seconds
        waits.switch(None)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


DP, WORLD, MESSAGE = 0, 1, 2


@pytest.fixture
def waits(clock):
    """Rank 0 of 4, in a pipeline with rank 2."""
    found = Waits()
    found.channels[DP], found.seconds[DP] = Channel((0, 1), 0, name="dp"), 0.0
    found.channels[WORLD], found.seconds[WORLD] = Channel((0, 1, 2, 3), 0, name=""), 0.0
    found.channels[MESSAGE], found.seconds[MESSAGE] = Channel((0, 2), -3, name="pp"), 0.0
    return found


def test_each_wait_counts_for_what_was_waited_for_and_the_rest_is_compute(clock, waits):
    steps = StepClock(waits, [0, 2])
    clock.wait(waits, DP, 50.0)  # before the step
    steps.start()
    clock.compute(8.0)
    for number in (MESSAGE, WORLD, PEERS):
        clock.wait(waits, number, 1.0)
    clock.wait(waits, DP, 5.0)
    with waits.loading():
        clock.compute(0.5)
        clock.now += 1.5
    step = steps.stop()
    assert (step.step_s, step.compute_s, step.cpu_s) == (18.0, 8.0, 8.0)
    assert (step.bubble_s, step.communication_s, step.data_s) == (3.0, 5.0, 2.0)


def test_without_a_pipeline_there_is_no_bubble(clock, waits):
    steps = StepClock(waits, [0])
    clock.wait(waits, WORLD, 1.0)
    step = steps.stop()
    assert (step.bubble_s, step.communication_s) == (0.0, 1.0)


def test_a_wait_inside_another_is_counted_once(clock, waits):
    waits.switch(DP)
    clock.now += 1.0
    clock.wait(waits, WORLD, 2.0)
    waits.switch(None)
    assert (waits.seconds[DP], waits.seconds[WORLD]) == (1.0, 2.0)


def test_the_shares_of_an_interval_add_up_to_all_of_it(clock, waits):
    waits.begin_activity("training")
    interval, steps = IntervalTimes(waits), StepClock(waits)
    clock.compute(60.0)
    clock.wait(waits, DP, 10.0)
    interval.add(steps.stop())
    for activity, seconds in (("saving a checkpoint", 16.0), ("evaluating", 8.0)):
        waits.begin_activity(activity)
        clock.wait(waits, DP, seconds)  # of its own, and none of a step
    waits.begin_activity("training")
    clock.compute(6.0)
    shares = shares_of(interval.seconds())
    assert tuple(shares) == PARTS
    expected = [0.6, 0.1, 0.0, 0.0, 0.16, 0.08, 0.06]
    assert list(shares.values()) == pytest.approx(expected)
    later = shares_of(IntervalTimes(waits).seconds())
    assert later["checkpoint"] == 0.0
