"""Exact sums of gradients, and the weight gradients of units that are added to them."""

import pytest
import torch

from megatron.core.parameters.exact_sum import (
    GRID,
    LIMIT,
    add_on_grid,
    in_own_memory,
    round_sums,
)
from megatron.core.tensor_parallel.unit_products import Units
from tests.harness.tolerances import BF16_REORDERED_SUM, FP32_REORDERED_SUM, assert_close

LARGE = 3 * 2**17 + 5
"""Elements of several parts."""


def exact_sum(terms):
    sums = torch.full(terms[0].shape, torch.nan, dtype=torch.float64)
    for number, term in enumerate(terms):
        add_on_grid(sums, term, is_first=number == 0)
    return sums


@pytest.mark.parametrize("shape", [(), (7,), (LARGE,), (3, LARGE), (0, 4)])
def test_sums_do_not_depend_on_the_order_of_their_terms(shape):
    terms = [torch.randn(shape) * 10.0**power for power in (-12, -6, -3, 0)]
    sums = exact_sum(terms)
    assert torch.equal(exact_sum(terms[::-1]), sums)
    assert torch.equal(sums, (sums / GRID).round() * GRID)
    exact = sum(term.double() for term in terms)
    torch.testing.assert_close(sums, exact, rtol=0, atol=len(terms) * GRID / 2)


def test_sums_in_columns_of_a_longer_tensor_are_the_same():
    terms = [torch.randn(300, 1000) for _ in range(2)]
    joined = torch.zeros(300, 3000, dtype=torch.float64)
    for number, term in enumerate(terms):
        add_on_grid(joined[:, 1000:2000], term, is_first=number == 0)
    assert torch.equal(joined[:, 1000:2000], exact_sum(terms))
    assert joined.count_nonzero() == joined[:, 1000:2000].count_nonzero()


@pytest.mark.parametrize("factor", [1.0, 4.0 / 3, 2.0**-30, 1.0 / 1000])
def test_sums_are_rounded_once_and_infinite_beyond_their_limit(factor):
    sums = torch.randn(LARGE, dtype=torch.float64)
    sums[:4] = torch.tensor([LIMIT * 0.999, -LIMIT * 2, torch.nan, -torch.inf])
    expected = (sums * factor).float()
    expected[1] = -torch.inf
    round_sums(sums, factor)
    assert torch.equal(sums.nan_to_num(), expected.double().nan_to_num())
    assert sums[:4].isfinite().tolist() == [True, False, False, False]


@pytest.mark.parametrize("shape", [(), (5,), (3, LARGE)])
def test_rounded_sums_move_to_fp32_in_their_own_memory(shape):
    sums = torch.randn(shape, dtype=torch.float64)
    expected = sums.float()
    values = in_own_memory(sums)
    assert torch.equal(values, expected)
    assert values.data_ptr() == sums.data_ptr()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_units_of_a_rank_have_the_weight_gradients_of_one_process(dim, runs, dtype):
    grad, rows = (torch.randn(24, 512, dtype=dtype) for _ in range(2))
    whole = torch.empty(512, 512, dtype=torch.float64)
    Units(dim, 8, runs=runs).add_weight_gradient(whole, grad, rows, is_first=True)
    exact = grad.double().t() @ rows.double()
    tolerance = BF16_REORDERED_SUM if dtype == torch.bfloat16 else FP32_REORDERED_SUM
    assert_close(whole, exact, tolerance, "weight gradient")
    for rank in range(4):
        split = [x.chunk(4, 1)[rank] if dim == d else x for d, x in enumerate((grad, rows))]
        shape = [x.shape[1] for x in split]
        part = torch.empty(shape, dtype=torch.float64)
        Units(dim, 2, runs=runs).add_weight_gradient(part, *split, is_first=True)
        assert torch.equal(part, whole.chunk(4, dim)[rank])
        Units(dim, 2, runs=runs).add_weight_gradient(part, *split, is_first=False)
        assert torch.equal(part, 2 * whole.chunk(4, dim)[rank])
