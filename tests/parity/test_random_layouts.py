"""The cases of `python -m tests.parity.random_layouts`, and that they are what they claim."""

import subprocess
import sys

import pytest

from tests.parity.random_layouts.cases import LAYOUTS_PER_MODEL, Case, draw_cases
from tests.parity.random_layouts.figures import figures_of_log
from tests.parity.random_layouts.layouts import LAYOUT_FLAGS
from tests.parity.random_layouts.outcomes import Kind, Verdict
from tests.parity.random_layouts.shrink import shrink


def drawn(seed, count):
    return [case for cases in draw_cases(seed, count) for case in cases]


def test_a_seed_always_draws_the_same_cases():
    assert drawn(3, 50) == drawn(3, 50)
    assert drawn(3, 50) != drawn(4, 50)
    assert drawn(3, 50)[:20] == drawn(3, 20)


def test_layouts_of_one_model_share_the_run_of_one_process():
    for cases in draw_cases(1, 10 * LAYOUTS_PER_MODEL):
        assert len({str(case.serial) for case in cases}) == 1
        assert not LAYOUT_FLAGS & set(cases[0].serial.settings)


def test_a_case_is_read_as_it_was_written():
    for case in drawn(2, 100):
        assert str(Case.read(str(case))) == str(case)


def test_cases_reach_every_axis_and_most_flags():
    cases = drawn(5, 1200)
    assert {case.ranks for case in cases} == {2, 3, 4, 6, 8}
    seen = {name for case in cases for name in case.settings}
    assert seen >= LAYOUT_FLAGS


def test_the_figures_of_a_log_are_those_that_a_layout_may_not_change():
    line = (
        " [2026-11-22 10:00:00] iteration        2/       3 | elapsed time per iteration (ms): 13.5"
        " | lm loss: 4.525173E+00 | grad norm: 1.153 | tokens/s/device: 944.6 | ETA: 00:00:01 |\n"
        " > sequence_parallel = False\n"
        " iteration        2 | tokens of experts, lowest/median/p90/highest of even"
        " | 1: 0.75/1.00/1.10/1.20 (12.5% dropped) |"
    )
    found = [(f.name, f.value, f.unit) for f in figures_of_log(line)]
    assert found[2:4] == [("lm loss: #", 4.525173, 1e-6), ("grad norm: #", 1.153, 1e-3)]
    assert [value for _, value, _ in found[-6:]] == [1.0, 0.75, 1.0, 1.1, 1.2, 12.5]
    assert not any("elapsed" in name or "tokens" in name or "ETA" in name for name, _, _ in found)


@pytest.mark.parametrize("guilty", [("swiglu",), ("ddp-bucket-size", "fp16")])
def test_a_failing_case_is_shrunk_to_the_flags_that_make_it_fail(guilty):
    case = Case(8, True, {**drawn(1, 1)[0].settings, **dict.fromkeys(guilty, True)})

    def judge(case):
        fails = set(guilty) <= set(case.settings)
        return Verdict(case, Kind.BROKEN if fails else Kind.EQUAL, "boom" if fails else "")

    small = shrink(judge(case), judge).case
    extra = set(small.settings) - set(guilty)
    assert not {"lr-decay-style", "seed", "ffn-hidden-size"} & extra
    assert small.ranks == 2


@pytest.mark.distributed
def test_random_command_lines_and_those_that_once_failed_equal_one_process():
    words = ["--cases", "6", "--seed", "5599", "--former", "--no-shrink", "--jobs", "2"]
    module = [sys.executable, "-m", "tests.parity.random_layouts"]
    ran = subprocess.run([*module, *words], capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
