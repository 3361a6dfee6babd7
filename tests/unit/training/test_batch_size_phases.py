"""Batch sizes that change at numbers of tokens: --step-batch-size-schedule."""

import pytest

from megatron.core import num_microbatches_calculator as calculator
from megatron.core.foundation.errors import ConfigError
from megatron.core.settings.batch_size_phases import (
    parse_phases,
    samples_in_phases,
    size_in_phases,
    steps_in_phases,
)
from megatron.training.cli.parser import parse_command_line
from megatron.training.rules import resolve_and_check

BASE = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2"
    " --lr 1e-3 --mock-data"
)


def run(words: list[str]):
    return resolve_and_check(lambda: parse_command_line([*BASE.split(), *words]), lambda config: 2)


def test_numbers_of_tokens_have_units_and_become_samples():
    found = parse_phases("0:16 2.4B:320, 4.8b:1536", 2048)
    assert found == ((0, 16), (1_171_875, 320), (2_343_750, 1536))
    assert parse_phases("0:2 1K:4 1001:6", 10) == ((0, 2), (100, 4), (101, 6))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begin with 0"), ("8:2", "begin with 0"), ("0:2 x:4", "'x:4'"), ("0:2 8", "'8'"),
        ("0:2 80:4 16:8", "do not rise"), ("0:2 1:4 2:6", "do not rise"), ("0:0", "below 1"),
        ("0:2 1/0:4", "'1/0:4'"), ("0:2 1e30:4", "no run reaches"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_read_says_why(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_phases(text, 8)
    if text:
        with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
            run(["--train-iters", "4", "--step-batch-size-schedule", text])


@pytest.mark.parametrize("text", ["0:4", "0:4 80:8", "0:4 80:6 160:12 8K:8"])
def test_steps_and_samples_are_those_of_a_loop(text):
    phases, consumed = parse_phases(text, 8), 0
    for step in range(300):
        assert samples_in_phases(step, phases) == consumed
        assert steps_in_phases(consumed, phases) == step
        consumed += size_in_phases(consumed, phases)


def test_a_run_has_the_batches_of_its_schedule():
    found = run(["--train-iters", "6", "--step-batch-size-schedule", "0:4 64:8 128:12"])
    assert (found.schedule.global_batch_size, found.schedule.train_samples) == (
        12,
        4 + 4 + 8 + 12 * 3,
    )
    numbers = (0, None, found.schedule.global_batch_size, 2, 2, False, "0:4 64:8 128:12", 8)
    made = calculator.build_num_microbatches_calculator(*numbers)
    sizes, consumed = [], 0
    for _ in range(6):
        made.update(consumed, consistency_check=True)
        sizes.append((made.get_current_running_global_batch_size(), made.get()))
        consumed += sizes[-1][0]
    assert sizes == [(4, 1), (4, 1), (8, 2), (12, 3), (12, 3), (12, 3)]


def test_a_schedule_that_does_not_fit_the_run_is_told():
    words = ["--train-iters", "4", "--step-batch-size-schedule", "0:4 64:6 128:8"]
    with pytest.raises(ConfigError) as caught:
        run([*words, "--global-batch-size", "16", "--rampup-batch-size", "4", "4", "9"])
    text = str(caught.value)
    assert "use --global-batch-size 8" in text
    assert "drop --rampup-batch-size" in text
    assert "use 4 for 6" in text
