"""What the named tolerances let pass and what they catch."""

import math

import pytest
import torch

from tests.harness.tolerances import (
    EXACT,
    FP32_REORDERED_SUM,
    TOLERANCES,
    assert_close,
    relative_error,
)


def test_every_tolerance_states_its_reason():
    assert all(len(tolerance.reason) > 20 for tolerance in TOLERANCES.values())


def test_exact_catches_the_last_bit_and_the_dtype():
    one = torch.ones(3)
    assert_close(one, one.clone(), EXACT, "ones")
    with pytest.raises(AssertionError, match="EXACT"):
        assert_close(torch.nextafter(one, 2 * one), one, EXACT, "ones")
    with pytest.raises(AssertionError, match="float64"):
        assert_close(one.double(), one, EXACT, "ones")


@pytest.mark.parametrize("num_terms", [64, 1024, 4096])
def test_reordered_sum_holds_for_a_matmul_cut_in_eight(num_terms):
    generator = torch.Generator().manual_seed(num_terms)
    x = torch.randn(64, num_terms, generator=generator)
    w = torch.randn(num_terms, 64, generator=generator)
    parts = [a @ b for a, b in zip(x.chunk(8, 1), w.chunk(8, 0), strict=True)]
    assert_close(sum(parts), x @ w, FP32_REORDERED_SUM, "product")


def test_reordered_sum_catches_one_lost_product_of_many():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 4096, generator=generator), torch.randn(4096, 8, generator=generator)
    x_cut = x.clone()
    x_cut[:, -1] = 0
    with pytest.raises(AssertionError, match="max relative error"):
        assert_close(x_cut @ w, x @ w, FP32_REORDERED_SUM, "product")


def test_a_small_element_is_judged_by_the_size_of_its_tensor():
    expected = torch.tensor([1.0, 1.0, 1e-9])
    assert_close(torch.tensor([1.0, 1.0, 1e-7]), expected, FP32_REORDERED_SUM, "cancelled sum")
    assert relative_error(torch.tensor([1.0, 1.0, 1e-7]), expected) < 2e-7


def test_a_large_element_is_judged_by_its_own_size():
    expected = torch.tensor([1e3, 1.0, 1.0, 1.0])
    with pytest.raises(AssertionError, match=r"worst at \(0,\)"):
        assert_close(expected + torch.tensor([0.1, 0, 0, 0]), expected, FP32_REORDERED_SUM, "x")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_only_equal_themselves(value):
    expected = torch.tensor([1.0, value])
    assert_close(expected.clone(), expected, FP32_REORDERED_SUM, "same")
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, 2.0]), expected, FP32_REORDERED_SUM, "lost")
    with pytest.raises(AssertionError):
        assert_close(expected, torch.tensor([1.0, 2.0]), FP32_REORDERED_SUM, "appeared")


def test_shapes_are_not_broadcast():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(2, 1), torch.ones(2), EXACT, "ones")
