"""Mappings, batches and splitting on one rank: nothing happens, and nothing is copied."""

import pytest
import torch

from megatron.core import tensor_parallel
from megatron.core.foundation.errors import DataError
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.topology.group import SINGLE_RANK
from tests.harness.groups import FakeGroup

MAPPINGS = [name for name in tensor_parallel.__all__ if name.endswith("_region")]


@pytest.mark.parametrize("name", [*MAPPINGS, "all_to_all_sp2hp", "all_to_all_hp2sp"])
def test_mappings_of_one_rank_return_the_input_itself(name):
    x = torch.randn(4, 2)
    mapping = getattr(tensor_parallel, name)
    assert mapping(x) is x
    assert mapping(x, group=FakeGroup(0, 1)) is x


def test_all_to_all_of_one_rank_returns_the_input_itself():
    x = torch.randn(4, 2)
    assert tensor_parallel.all_to_all(SINGLE_RANK, x) is x


def test_broadcast_on_one_rank_returns_the_batch():
    batch = {"tokens": torch.arange(6).view(2, 3), "labels": torch.arange(4), "other": None}
    got = tensor_parallel.broadcast_data(["tokens", "labels"], batch, torch.int64)
    assert list(got) == ["tokens", "labels"]
    assert torch.equal(got["tokens"], batch["tokens"])
    assert torch.equal(got["labels"], batch["labels"])


@pytest.mark.parametrize(("value", "text"), [
    (None, "'tokens' is missing from the batch"),
    (torch.zeros(2), "'tokens' .*has another dtype"),
    (torch.zeros((1,) * 6, dtype=torch.int64), "too many dimensions"),
])  # fmt: skip
def test_a_bad_batch_is_refused(value, text):
    with pytest.raises(DataError, match=text):
        tensor_parallel.broadcast_data(["tokens"], {"tokens": value}, torch.int64)


def test_splitting_the_last_dimension():
    x = torch.arange(12).view(2, 6)
    views = tensor_parallel.split_tensor_along_last_dim(x, 3)
    copies = tensor_parallel.split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True)
    assert torch.equal(torch.cat(views, -1), x)
    assert [v.is_contiguous() for v in views] == [False] * 3
    assert all(c.is_contiguous() and torch.equal(c, v) for c, v in zip(copies, views, strict=True))


@pytest.mark.parametrize("new_buffer", [False, True])
def test_flat_pieces_cover_the_tensor(new_buffer):
    x = torch.arange(12).view(3, 4)
    pieces = [
        tensor_parallel.split_tensor_into_1d_equal_chunks(x, new_buffer, FakeGroup(rank, 4))
        for rank in range(4)
    ]
    assert torch.equal(torch.cat(pieces), x.flatten())
    shares = pieces[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert shares == (not new_buffer)
    assert tensor_parallel.gather_split_1d_tensor(pieces[0], FakeGroup(0, 1)) is pieces[0]


def test_vocabulary_ranges_are_consecutive():
    ranges = [VocabUtility.vocab_range_from_global_vocab_size(24, rank, 4) for rank in range(4)]
    assert ranges == [(0, 6), (6, 12), (12, 18), (18, 24)]
