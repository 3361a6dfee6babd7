"""Every element of every parameter is owned exactly once, whatever the sizes."""

import random

import pytest

from megatron.core.distributed.sharding_arithmetic import BLOCK, plan_buffer


def random_plan(seed):
    draw = random.Random(seed)
    numels = [
        draw.choice([1, 7, 128, 1000, draw.randint(1, 5000)]) for _ in range(draw.randint(1, 12))
    ]
    bucket = draw.choice([None, 1, 500, 3000, 10**6])
    shards = draw.choice([1, 2, 3, 4, 7, 8])
    separate = {i for i in range(len(numels)) if draw.random() < 0.2}
    units = None
    if seed % 2:  # stage 3: buckets are units
        units = sorted(draw.randint(0, 4) for _ in numels)
    plan = plan_buffer(
        numels, bucket_numel=bucket, num_shards=shards, separate=separate, units=units
    )
    return numels, shards, plan


def random_plans(first):
    return [random_plan(seed) for seed in range(first, first + 20)]


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_shards_own_each_element_of_each_parameter_once_from_block_borders_on(seed):
    for numels, size, plan in random_plans(seed):
        owned = [[0] * n for n in numels]
        slots = {slot.index: slot for slot in plan.slots}
        for bucket in range(len(plan.buckets)):
            for rank in range(size):
                begin, end = plan.shard(bucket, rank, size)
                for piece in plan.pieces(begin, end):
                    for element in range(piece.begin, piece.end):
                        owned[piece.index][element] += 1
                    assert piece.begin % BLOCK == 0 and piece.offset % BLOCK == 0
                    assert piece.offset == slots[piece.index].begin + piece.begin
                    assert begin <= piece.offset < piece.offset + piece.end - piece.begin <= end
        assert all(set(counts) == {1} for counts in owned)


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_buckets_tile_the_buffer_and_slots_follow_in_reverse_order(seed):
    for numels, size, plan in random_plans(seed):
        assert plan.buckets[0][0] == 0 and plan.buckets[-1][1] == plan.numel
        assert all(a[1] == b[0] for a, b in zip(plan.buckets, plan.buckets[1:], strict=False))
        assert all((end - begin) % (BLOCK * size) == 0 for begin, end in plan.buckets)
        assert [slot.index for slot in plan.slots] == list(reversed(range(len(numels))))
        assert all(slot.end - slot.begin == numels[slot.index] for slot in plan.slots)
        assert all(slot.begin % BLOCK == 0 for slot in plan.slots)
        assert all(a.end <= b.begin for a, b in zip(plan.slots, plan.slots[1:], strict=False))


@pytest.mark.parametrize("seed", range(10))
def test_a_parameter_set_apart_is_cut_the_same_in_any_company(seed):
    draw = random.Random(seed)
    tied, size, most = draw.randint(1, 9000), draw.choice([1, 2, 4]), draw.choice([None, 700])

    def cuts(before, after):
        index = len(before)
        plan = plan_buffer(
            [*before, tied, *after],
            bucket_numel=draw.choice([None, 300, 5000]),
            num_shards=size,
            separate={index},
            separate_numel=most,
        )
        return [
            [
                (piece.begin, piece.end)
                for b in range(len(plan.buckets))
                for piece in plan.pieces(*plan.shard(b, rank, size))
                if piece.index == index
            ]
            for rank in range(size)
        ]

    others = [draw.randint(1, 3000) for _ in range(3)]
    assert cuts([], others) == cuts(others, []) == cuts(others[:1], others[1:])


def test_a_large_parameter_spans_several_buckets():
    plan = plan_buffer([10_000, 100], bucket_numel=2_000, num_shards=2)
    assert len(plan.buckets) == 6
    assert [len(plan.slots_in(*bucket)) for bucket in plan.buckets] == [2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(0, 100, 20))
def test_a_unit_is_one_bucket_and_a_bucket_one_unit(seed):
    for number in range(seed, seed + 20):
        draw = random.Random(number)
        numels = [draw.randint(1, 5000) for _ in range(draw.randint(1, 12))]
        units = sorted(draw.randint(0, 5) for _ in numels)
        size = draw.choice([1, 2, 3, 8])
        plan = plan_buffer(numels, bucket_numel=None, num_shards=size, units=units)
        held = [{units[slot.index] for slot in plan.slots_in(*bucket)} for bucket in plan.buckets]
        # In buffer order, that is backward.
        assert held == [{unit} for unit in sorted(set(units), reverse=True)]
        for bucket, (begin, end) in enumerate(plan.buckets):
            for rank in range(size):
                pieces = plan.pieces(*plan.shard(bucket, rank, size))
                assert len({piece.index for piece in pieces}) == len(pieces)
            assert (
                end - begin
                < sum(n + BLOCK for n, u in zip(numels, units, strict=True) if {u} == held[bucket])
                + BLOCK * size
            )
