"""The zigzag partition: every position once, equal causal work, and the way back."""

import pytest
import torch

from megatron.core.context_parallel.partition import (
    get_batch_on_this_cp_rank,
    join_zigzag,
    sequence_shard_of_rank,
    shard_sequence,
    split_zigzag,
)
from megatron.core.foundation.errors import DataError
from megatron.core.step_context.random_scope import SequenceShard
from tests.harness.groups import FakeGroup

SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_hold_every_position_once_and_as_many_as_each_other(size):
    rows = [SequenceShard.zigzag(48, rank, size) for rank in range(size)]
    held = torch.cat([part.positions() for part in rows])
    assert held.sort().values.tolist() == list(range(48))
    assert {part.length for part in rows} == {48 // size}


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_same_causal_work(size):
    work = {
        int((SequenceShard.zigzag(96, rank, size).positions() + 1).sum()) for rank in range(size)
    }
    assert len(work) == 1


def test_local_rows_and_positions_are_inverse():
    rows = SequenceShard.zigzag(16, 1, 2)
    assert rows.positions().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    rows = SequenceShard.zigzag(16, 0, 2)
    assert rows.positions().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert [rows.index_of(p) for p in (0, 3, 4, 11, 12, 15)] == [0, 3, None, None, 4, 7]


def test_sequence_parallel_ranks_cut_the_zigzag_part():
    group = [FakeGroup(rank, 2) for rank in range(2)]
    parts = [sequence_shard_of_rank(4, cp=group[0], sp=sp).positions().tolist() for sp in group]
    assert parts == [[0, 1, 2, 3], [12, 13, 14, 15]]


@pytest.mark.parametrize("size", SIZES)
def test_joining_the_ranks_pieces_gives_the_sequence_back(size):
    whole = torch.randn(48, 2, 5)
    parts = torch.stack([shard_sequence(whole, 0, rank, size) for rank in range(size)])
    assert torch.equal(join_zigzag(parts), whole)
    assert torch.equal(split_zigzag(whole, size), parts)


def test_neighbours_together_hold_the_zigzag_part_of_a_smaller_group():
    whole = torch.arange(32)
    for outer in range(2):
        pair = torch.stack([shard_sequence(whole, 0, 2 * outer + inner, 4) for inner in range(2)])
        assert torch.equal(join_zigzag(pair), shard_sequence(whole, 0, outer, 2))


def test_a_batch_is_cut_by_position_and_documents_stay_whole():
    batch = {
        "tokens": torch.arange(16).view(1, 16),
        "attention_mask": torch.arange(16).view(1, 1, 16, 1).expand(1, 1, 16, 16),
        "document_starts": torch.zeros(1, 16),
        "labels": None,
    }
    cut = get_batch_on_this_cp_rank(batch, FakeGroup(0, 2))
    expected = [0, 1, 2, 3, 12, 13, 14, 15]
    assert cut["tokens"].tolist() == [expected]
    assert cut["attention_mask"].shape == (1, 1, 8, 16)
    assert cut["attention_mask"][0, 0, :, 0].tolist() == expected
    assert cut["document_starts"].shape == (1, 16)
    assert cut["labels"] is None
    assert get_batch_on_this_cp_rank(batch, FakeGroup(0, 1)) == batch


def test_a_length_that_does_not_split_is_refused_with_one_that_does():
    with pytest.raises(DataError, match="14 positions, to be split over 4") as caught:
        get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 14)}, FakeGroup(0, 4))
    assert "for example 16" in caught.value.fix
