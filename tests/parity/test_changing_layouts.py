"""A short form of `python -m tests.parity.changing_layouts`."""

import pytest

from tests.parity import changing_layouts
from tests.parity.changing_layouts import LAYOUTS, differences, run_in_layouts
from tests.parity.resume import read_outcome

STEPS = 20
SHORT = (LAYOUTS[3], LAYOUTS[4], LAYOUTS[2], LAYOUTS[9], LAYOUTS[0])


@pytest.mark.distributed
def test_a_run_that_changes_its_layout_ends_with_the_bits_of_one_process(tmp_path, monkeypatch):
    small = changing_layouts.MODEL.replace("--global-batch-size 24", "--global-batch-size 12")
    monkeypatch.setattr(changing_layouts, "MODEL", small)
    changing_layouts.run_piece(1, changing_layouts.words_of(tmp_path / "one", STEPS, STEPS))
    pieces = list(run_in_layouts(tmp_path / "changing", STEPS, SHORT))
    assert [ranks for ranks, _ in pieces] == [2, 6, 4, 2, 1]
    one, changing = (read_outcome(tmp_path / name, STEPS) for name in ("one", "changing"))
    assert len(one.metrics) == STEPS
    assert differences(one, changing) == []
