"""A step that is not finite is run again, and the cause is named."""

import pytest

from megatron.resilience.rerun_verdict import Cause
from tests.faults.wrong_numbers import causes


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("index", "layout"),
    [(0, 0), (1, 3), (2, 2), (3, 4)],
    ids=[cause.value for cause in Cause],
)
def test_a_nan_is_traced_to_its_cause(index, layout, tmp_path):
    fault = causes.cases(4 * len(causes.LAYOUTS), 0)[4 * layout + index]
    assert causes.run_case(fault, tmp_path) == "right"
