"""Timers above the log level cost nothing and need their level said once."""

from types import SimpleNamespace

from megatron.core.timers import Timers


def test_a_timer_above_the_level_stays_silent_when_named_without_its_level():
    timers = Timers(log_level=0, log_option="minmax")
    timers("loader", log_level=2).start()
    timers("loader").stop()
    assert timers.seconds_of_all_ranks() == {}


def test_a_timer_at_the_level_accumulates_over_intervals():
    timers = Timers(log_level=2, log_option="minmax")
    for _ in range(2):
        timers("loader", log_level=2).start()
        timers("loader").stop()
    assert list(timers.seconds_of_all_ranks()) == ["loader"]
    assert timers("loader").active_time() > 0


def test_a_writer_gets_the_seconds_of_each_timer_and_ranks_without_one_write_nothing():
    timers = Timers(log_level=2, log_option="minmax")
    timers("loader", log_level=2).start()
    timers("loader").stop()
    found = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: found.append(scalar))
    timers.write(["loader"], None, 3, reset=False)
    timers.write(["loader"], writer, 3, normalizer=2.0)
    assert found == [("loader-time", timers("loader").active_time() / 2, 3)]
    assert timers("loader").elapsed() == 0
