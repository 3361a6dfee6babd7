"""A sample of `python -m tests.parity.planted_faults`."""

import pytest

from tests.parity.planted_faults import FAULTS, FaultyExecution, find

SAMPLE = (
    "gradients are divided by one micro batch too many",
    "the mask of one rank's heads is shifted by a key",
)


def test_there_are_at_least_twenty_faults_with_names_of_their_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20


@pytest.mark.distributed
@pytest.mark.parametrize("name", SAMPLE)
def test_one_digest_finds_a_planted_fault(name, tmp_path):
    fault = next(fault for fault in FAULTS if fault.name == name)
    assert find(FaultyExecution(tmp_path), fault, {}).by_digest
