"""A short form of `python -m tests.parity.changing_layouts`."""

import pytest

from tests.parity.changing_layouts import (
    LAYOUTS,
    differences,
    run_in_layouts,
    run_piece,
    words_of,
)
from tests.parity.resume import read_outcome

STEPS = 20
SHORT = (LAYOUTS[3], LAYOUTS[4], LAYOUTS[2], LAYOUTS[9], LAYOUTS[0])


@pytest.mark.distributed
def test_a_run_that_changes_its_layout_ends_with_the_bits_of_one_process(tmp_path):
    run_piece(1, words_of(tmp_path / "one", STEPS, STEPS))
    pieces = list(run_in_layouts(tmp_path / "changing", STEPS, SHORT))
    assert [ranks for ranks, _ in pieces] == [2, 6, 4, 2, 1]
    one, changing = (read_outcome(tmp_path / name, STEPS) for name in ("one", "changing"))
    assert len(one.metrics) == STEPS
    assert differences(one, changing) == []
