"""Global batches, constant and ramped up."""

import pytest

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.foundation.errors import ConfigError


def start(ramp=None, batch=32, micro=2, replicas=4, **options):
    calculator.init_num_microbatches_calculator(0, ramp, batch, micro, replicas, **options)


def test_a_constant_batch():
    start()
    calculator.update_num_microbatches(10**6)
    assert calculator.get_num_microbatches() == 4
    assert calculator.get_current_global_batch_size() == 32
    assert calculator.get_micro_batch_size() == 2


def test_a_ramp_takes_equal_steps_over_its_samples():
    start([8, 8, 300])
    seen = []
    for consumed in (0, 99, 100, 199, 200, 299, 300, 301, 10**9):
        calculator.update_num_microbatches(consumed)
        seen.append(calculator.get_current_global_batch_size())
    assert seen == [8, 8, 16, 16, 24, 24, 32, 32, 32]
    assert calculator.get_num_microbatches() == 4


def test_a_ramp_of_no_length_is_the_full_batch():
    start([8, 8, 0])
    assert calculator.get_current_global_batch_size() == 32


def test_a_batch_that_replicas_cannot_share_is_refused_with_the_nearest_ones():
    with pytest.raises(ConfigError, match="not a multiple of 8") as raised:
        start(batch=30)
    assert "use 24 or 32" in str(raised.value)


def test_or_is_rounded_down_on_request():
    start(batch=30, decrease_batch_size_if_needed=True)
    assert calculator.get_current_global_batch_size() == 30
    assert calculator.get_current_running_global_batch_size() == 24
    assert calculator.get_num_microbatches() == 3


def test_all_problems_of_a_ramp_come_in_one_message():
    with pytest.raises(ConfigError) as raised:
        start([5, 7, 100], batch=31)
    assert "4 problems" in str(raised.value)


def test_zero_and_missing_sizes_are_named():
    with pytest.raises(ConfigError) as raised:
        start(batch=0, micro=None)
    assert "global_batch_size=0" in str(raised.value) and "micro_batch_size=0" in str(raised.value)


def test_a_second_calculator_is_refused_but_it_can_be_reconfigured():
    start()
    with pytest.raises(ConfigError, match="exists already"):
        start()
    calculator.reconfigure_num_microbatches_calculator(0, None, 64, 2, 4)
    assert calculator.get_num_microbatches() == 8
