"""Who hangs or is slow is named; other tests at the same time would slow ranks as well."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.faults import hangs, mismatches, stragglers


@pytest.mark.distributed
def test_who_holds_up_the_others_is_named_with_the_place_and_the_job_ends(tmp_path, references):
    soon = ("--ft-rank-heartbeat-timeout", "2")
    cases = [
        hangs.HangCase("tp2", hangs.STOP, 0, soon),
        hangs.HangCase("pp2", "training-thread", 1, soon),
    ]
    runs = [
        partial(hangs.run_hang, case, tmp_path / str(case.number), references, seed="0")
        for case in cases
    ]
    skipped = mismatches.MismatchCase("tp2", "skipped", 2)
    runs.append(partial(mismatches.run_mismatch, skipped, tmp_path / "2", references, seed="0"))
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda run: run(), runs))
    assert not any(result.problems for result in results), results


@pytest.mark.distributed
def test_a_rank_that_computes_longer_is_named_and_no_other(tmp_path, references):
    """A machine that others use may itself slow a rank for some steps, which is then named rightly:
    where that seems to have happened, two further runs must be right."""
    case = stragglers.cases(1)[0]

    def problems(attempt: str) -> list[str]:
        return stragglers.run_straggler(case, tmp_path / attempt, references).problems

    first = problems("first")
    assert not first or not [*problems("second"), *problems("third")], "\n".join(first)
