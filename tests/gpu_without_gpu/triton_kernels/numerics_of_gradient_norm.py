"""Sums of squares by Triton's interpreter: each shard's, wherever it begins."""

import pytest
import torch

from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.kernels.triton_kernels import squares
from megatron.core.optimizer.gradient_norm import Segments
from tests.gpu_without_gpu.triton_kernels.comparing import TOLERANCE_OF
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

NUM_BLOCKS = [1, 64, 0, 3, 130, 65]


def sums_of(flat, num_blocks):
    """Return the sums of squares of the shards of a flat gradient, from their numbers of blocks."""
    return squares.segment_squares(flat, Segments.of(ShardSpan(flat, [], num_blocks)), False)


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
def test_the_sums_of_shards_are_those_of_the_formula(dtype):
    flat = torch.randn(sum(NUM_BLOCKS) * 128).to(dtype)
    found = sums_of(flat, NUM_BLOCKS)
    pieces = flat.double().split([128 * number for number in NUM_BLOCKS])
    expected = torch.stack([piece.square().sum() for piece in pieces])
    assert found.dtype == torch.float64
    assert_close(found, expected, FP32_REORDERED_SUM, "sums")


def test_the_sum_of_a_shard_does_not_depend_on_its_place():
    shard, before = torch.randn(70 * 128), torch.randn(5 * 128)
    alone = sums_of(shard, [70])
    later = sums_of(torch.cat((before, shard, before)), [5, 70, 5])
    assert_close(later[1:2], alone, EXACT, "sum")


def test_a_gradient_that_is_not_finite_shows_in_its_own_shard_alone():
    flat = torch.randn(sum(NUM_BLOCKS) * 128)
    flat[128 * 70] = torch.nan
    assert sums_of(flat, NUM_BLOCKS).isfinite().cpu().tolist() == [True] * 4 + [False, True]
