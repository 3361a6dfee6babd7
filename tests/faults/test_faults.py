"""A few of the cases of `python -m tests.faults`."""

import pytest

from tests.faults import hangs, inprocess, plan
from tests.faults.promises import Kept, promise_for
from tests.faults.running import run_case

SAMPLE = (
    "TERM/launcher/step/torchrun/handler/2-workers",
    "KILL/launcher/step/torchrun/2-workers",
    "INT/group/step/python/0-workers",
    "STOP/group/import+start+step+evaluation+save+exit/python/2-workers",
)


@pytest.mark.distributed
@pytest.mark.parametrize("name", SAMPLE)
def test_a_disturbed_run_keeps_what_is_promised_and_goes_on_to_the_same_end(
    name, tmp_path, references
):
    cases = [*plan.matrix(), *plan.preempt(1)]
    (case,) = (case for case in cases if case.name == name)
    result = run_case(case, tmp_path / "case", references, seed="0")
    assert not result.problems, "\n".join(result.problems)


@pytest.mark.distributed
def test_who_lives_goes_on_in_its_process_with_a_spare_to_the_same_bits(tmp_path, references):
    case = inprocess.InprocessCase("zero1", 1)
    result = inprocess.run_inprocess(case, tmp_path / "case", references, seed="0")
    assert not result.problems, "\n".join(result.problems)


def test_random_hangs_meet_every_layout_in_every_way():
    met = {(case.layout, case.how) for case in hangs.cases(50)}
    assert met == {(layout, how) for layout in hangs.LAYOUTS for how in hangs.HOWS}


def test_every_signal_meets_every_target_at_every_moment():
    met = {(f.signal, f.target, f.moment) for case in plan.matrix() for f in case.faults}
    ranks = (plan.Target.RANK_0, plan.Target.RANK_1)
    for number in (plan.TERM, plan.INT, plan.KILL, plan.STOP):
        for moment in plan.Moment:
            assert any((number, rank, moment) in met for rank in ranks)
            assert (number, plan.Target.LAUNCHER, moment) in met
            assert (number, plan.Target.GROUP, moment) in met


def test_no_two_cases_are_the_same():
    names = [case.name for case in plan.matrix()]
    assert len(set(names)) == len(names)


def test_a_preempted_job_is_promised_its_last_step():
    assert {promise_for(case).kept for case in plan.preempt(2)} == {Kept.LAST_STEP}


@pytest.mark.parametrize("case", plan.matrix(), ids=lambda case: case.name)
def test_a_promise_exists_for_each_case_and_is_bounded(case):
    assert 0 < promise_for(case).within_s <= 120
