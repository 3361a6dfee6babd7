"""A few of the cases of `python -m tests.faults`."""

import pytest

from tests.faults import plan
from tests.faults.checks import References
from tests.faults.running import run_case

SAMPLE = (
    "TERM/rank-0/step/torchrun/handler/2-workers",
    "KILL/rank-1/step/torchrun/0-workers",
    "KILL/group/save/python/2-workers",
    "INT/group/step/python/0-workers",
    "STOP/group/import+start+step+evaluation+save+exit/python/2-workers",
)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", SAMPLE)
def test_a_disturbed_run_keeps_what_is_promised_and_goes_on_to_the_same_end(
    name, tmp_path, references
):
    (case,) = (case for case in plan.matrix() if case.name == name)
    result = run_case(case, tmp_path / "case", references, seed="0")
    assert not result.problems, "\n".join(result.problems)


def test_every_signal_meets_every_target_at_every_moment():
    met = {(f.signal, f.target, f.moment) for case in plan.matrix() for f in case.faults}
    ranks = (plan.Target.RANK_0, plan.Target.RANK_1)
    for signal in (plan.TERM, plan.INT, plan.KILL, plan.STOP):
        for moment in plan.Moment:
            assert any((signal, rank, moment) in met for rank in ranks)
            assert (signal, plan.Target.LAUNCHER, moment) in met
            assert signal is plan.INT or (signal, plan.Target.GROUP, moment) in met


def test_no_two_cases_are_the_same():
    names = [case.name for case in plan.matrix()]
    assert len(set(names)) == len(names)
