"""Rates of the five schedules: the numbers that deepspeed 0.19.8 sets, step by step."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.deepspeed import lr_schedules

CASES = {
    "warm-up, logarithmic": (
        "WarmupLR",
        {"warmup_num_steps": 5},
        [0.0, 0.0, 0.008613531, 0.013652124, 0.017227062, 0.02, 0.02],
    ),
    "decay, linear": (
        "WarmupDecayLR",
        {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear",
         "warmup_max_lr": 0.01, "warmup_min_lr": 0.001},
        [0.001, 0.001, 0.0055, 0.01, 0.00775, 0.0055, 0.00325, 0.001, 0.001],
    ),
    "cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear",
         "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2},
        [0.0, 0.002, 0.0065, 0.011, 0.0155, 0.018928203, 0.016, 0.012, 0.008, 0.005071797, 0.004],
    ),
    "cycle and decay": (
        "OneCycle",
        {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4,
         "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1},
        [0.001, 0.00325, 0.0055, 0.00775, 0.01, 0.00775, 0.0055, 0.00325, 0.001, 0.0008,
         0.000666667],
    ),
    "cycle in stairs": (
        "OneCycle",
        {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4,
         "cycle_second_step_size": 6, "cycle_first_stair_count": 2, "cycle_second_stair_count": 3},
        [0.001, 0.001, 0.0055, 0.0055, 0.01, 0.007, 0.007, 0.004, 0.004, 0.001, 0.001],
    ),
    "range test": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3,
         "lr_range_test_step_rate": 2.0},
        [0.001, 0.001666667, 0.002333333, 0.003, 0.003666667],
    ),
}  # fmt: skip


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.02)


@pytest.mark.parametrize("case", CASES)
def test_rates_are_those_of_deepspeed(case):
    name, params, expected = CASES[case]
    client = optimizer()
    schedule = lr_schedules.BY_NAME[name](client, **params)
    rates = schedule.get_lr()
    for _ in expected[1:]:
        schedule.step()
        rates += schedule.get_lr()
    assert rates == pytest.approx(expected, abs=1e-9)


def test_momentum_goes_the_other_way():
    client = optimizer()
    schedule = lr_schedules.OneCycle(client, 0.001, 0.01, cycle_first_step_size=2)
    momenta = [client.param_groups[0]["betas"][0]]
    for _ in range(4):
        schedule.step()
        momenta.append(client.param_groups[0]["betas"][0])
    assert momenta == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])


def test_schedule_resumes_where_it_was():
    first, second = (lr_schedules.WarmupLR(optimizer(), warmup_num_steps=9) for _ in range(2))
    for _ in range(4):
        first.step()
    second.load_state_dict(first.state_dict())
    assert second.get_lr() == first.get_lr() != [0.0]


def test_a_value_for_each_group():
    with pytest.raises(ConfigError, match="2 values in a schedule for 1 groups"):
        lr_schedules.WarmupLR(optimizer(), warmup_max_lr=[0.1, 0.2])
