"""Samples of uneven length in rows that as many ranks split as they need: the model is the same."""

import pytest

from tests.harness.tolerances import FP32_REORDERED_SUM
from tests.parity.shared_rows_case import CASES, errors_of


@pytest.mark.parametrize(
    "name",
    ["tp2 sp dp2 zero1", "pp2 vp2 dp2 recompute", "cp2 dp2 zero3 all_gather", "ep2 dp4 routers"],
)
def test_rows_of_any_number_of_ranks_train_the_same_model(tmp_path, name):
    errors = errors_of(CASES[name], tmp_path)
    bound = FP32_REORDERED_SUM.rtol
    assert max(errors.loss, errors.gradient, errors.grad_norm) < bound, errors
