"""Rows of samples of uneven length: nothing is lost, work is even, nobody waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.packing import balance
from megatron.core.foundation.errors import DataError
from megatron.core.topology.rank_grid import nested_sizes
from megatron.training.datasets.dynamic_cp import DpCpRank, PackedSequenceSampler, Packing
from tests.parity.shared_rows import (
    LONGEST,
    fixed_rows,
    lengths_of_source_files,
    pairs_of,
    work_of_layer,
)

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40)


def work_of(length):
    return 20.0 * length + length**2


@given(LENGTHS, st.integers(1, 12), st.integers(1, 4))
def test_each_sample_is_in_one_row_that_fits_and_all_ranks_agree_on_it(lengths, ranks, multiple):
    batch = balance(lengths, ranks, 64, work_of, multiple)
    rows = {row for microbatch in batch.microbatches for row in microbatch}
    found = sorted(i for row in rows for i in row.samples)
    assert found == list(range(len(lengths)))
    assert len(batch.microbatches) % multiple == 0
    for microbatch in batch.microbatches:
        assert len(microbatch) == ranks
        for rank, row in enumerate(microbatch):
            assert row.num_ranks in nested_sizes(ranks)
            assert row.first_rank % row.num_ranks == 0
            assert row.first_rank <= rank < row.first_rank + row.num_ranks
            assert sum(lengths[i] for i in row.samples) <= 64 * row.num_ranks
            if row.samples:
                sharing = range(row.first_rank, row.first_rank + row.num_ranks)
                assert all(microbatch[other] == row for other in sharing)


@given(LENGTHS, st.integers(1, 12))
def test_ranks_of_a_row_have_computed_the_same_rows_before(lengths, ranks):
    batch = balance(lengths, ranks, 64, work_of)
    for rank, rows in enumerate(zip(*batch.microbatches, strict=True)):
        for number, row in enumerate(rows):
            if row.samples:
                for before in rows[:number]:
                    inside = before.first_rank <= row.first_rank
                    assert inside and before.num_ranks >= row.num_ranks, (rank, before, row)


@given(LENGTHS, st.integers(1, 12))
def test_the_work_of_ranks_is_that_of_their_rows(lengths, ranks):
    batch = balance(lengths, ranks, 64, work_of)
    assert sum(batch.work) == pytest.approx(sum(map(work_of, lengths)))
    for rank, work in enumerate(batch.work):
        rows = [microbatch[rank] for microbatch in batch.microbatches]
        shares = (work_of(lengths[i]) / row.num_ranks for row in rows for i in row.samples)
        assert work == pytest.approx(sum(shares))


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_work_on_the_lengths_of_source_files_is_even(ranks):
    lengths = lengths_of_source_files(512)
    assert min(lengths) >= 128 and max(lengths) == LONGEST
    batch = balance(lengths, ranks, LONGEST // ranks * 2, work_of_layer)
    assert batch.imbalance <= 1.05
    pairs = sum(map(pairs_of, lengths))
    assert pairs * 1.5 < sum(pairs_of(sum(row)) for row in fixed_rows(lengths))


def test_a_sample_that_no_ranks_can_hold_is_refused_with_a_length_that_works():
    with pytest.raises(DataError, match="--max-seqlen-per-dp-cp-rank 17"):
        balance([65], 4, 16, work_of)


class Samples:
    """Lengths alone."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def num_tokens(self, number):
        return self.lengths[number]


@given(LENGTHS, st.integers(1, 7), st.integers(1, 6))
def test_a_run_that_begins_again_continues_with_the_row_that_came_next(lengths, size, ranks):
    def rows(begin, rank):
        share = DpCpRank(rank=rank, num_ranks=ranks, max_tokens=64)
        packing = Packing(Samples(lengths), share, work_of, lambda _: size)
        return list(PackedSequenceSampler(packing, begin)), packing

    for rank in range(ranks):
        whole, packing = rows(0, rank)
        counts = [packing.plan(at).num_microbatches for at in range(0, len(lengths), size)]
        assert len(whole) == sum(counts)
        for step in range(len(counts)):
            assert rows(step * size, rank)[0] == whole[sum(counts[:step]) :]
