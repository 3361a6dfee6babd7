"""The digest of a tensor sees every bit of it."""

import pytest
import torch

from megatron.resilience.replica_check import digest_of

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("numel", [1, 3, 1024, 5000])
def test_one_bit_anywhere_changes_it(dtype, numel):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(3)).to(dtype)
    digest = int(digest_of(tensor))
    assert digest == int(digest_of(tensor.clone()))
    words, width = tensor.view(WORDS[dtype]), 8 * tensor.element_size()
    for bit in (0, 7, width - 2, width - 1):
        mask = -(1 << bit) if bit == width - 1 else 1 << bit
        for index in sorted({0, numel // 2, numel - 1}):
            words[index] ^= mask
            assert int(digest_of(tensor)) != digest, (bit, index)
            words[index] ^= mask


def test_rows_that_change_places_change_it():
    tensor = torch.randn(4, 8192, generator=torch.Generator().manual_seed(3))
    assert int(digest_of(tensor[[1, 0, 2, 3]])) != int(digest_of(tensor))


def test_the_place_in_memory_does_not():
    tensor = torch.randn(6000, generator=torch.Generator().manual_seed(3))
    for begin in (1, 2, 3):
        assert int(digest_of(tensor[begin:])) == int(digest_of(tensor[begin:].clone()))
    assert int(digest_of(tensor.view(60, 100).t())) == int(
        digest_of(tensor.view(60, 100).t().contiguous())
    )
