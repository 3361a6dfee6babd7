"""Losses, their gradients and their reports are those of formulas in fp64.

Layouts agree with one process where both are wrong in the same way: only a formula shows that a
mask belongs to another token, or that a mean is over other tokens.
"""

import pytest

from megatron.core.models.common.language_module.language_module import LanguageModule
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.values.cases import CASES
from tests.unit.values.comparison import Case, shifted
from tests.unit.values.draws import FEATURES, SEEDS, Draw, draw


def draws(case: Case) -> list[Draw]:
    return [drawn for drawn in map(draw, SEEDS) if case.takes(drawn)]


def compare(case: Case, drawn: Draw) -> None:
    found, expected = case.product(drawn), case.formula(drawn)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name].double(), value.double(), FP32_REORDERED_SUM, name)


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_gradients_and_reports_of_the_formula(name):
    for drawn in draws(CASES[name]):
        compare(CASES[name], drawn)


@pytest.mark.parametrize("name", CASES)
def test_a_mask_that_is_shifted_by_one_token_is_found(name, monkeypatch):
    CASES[name].plant(monkeypatch)
    for drawn in draws(CASES[name]):
        with pytest.raises(AssertionError):
            compare(CASES[name], drawn)


def test_a_mask_that_the_fused_loss_was_promised_changes_no_number(monkeypatch):
    right = LanguageModule.compute_loss
    monkeypatch.setattr(
        LanguageModule,
        "compute_loss",
        lambda self, states, labels, weight, mask: right(
            self, states, labels, weight, shifted(mask)
        ),
    )
    for drawn in draws(CASES["next token, fused"]):
        compare(CASES["next token, fused"], drawn)


@pytest.mark.parametrize("name", CASES)
def test_every_feature_is_drawn_or_left_out_for_a_reason(name):
    case = CASES[name]
    for feature, has in FEATURES.items():
        is_drawn = any(has(drawn) for drawn in draws(case))
        assert is_drawn or case.without.get(feature), feature
    assert case.without.keys() <= FEATURES.keys()
