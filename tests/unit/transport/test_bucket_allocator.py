"""Places for buckets that come and go: apart from each other, and few."""

import random

import pytest
import torch

from megatron.core.transport.shm.bucket_allocator import BucketAllocator

PAGE = 1024  # elements


def range_of(place):
    return place.data_ptr(), place.data_ptr() + place.nbytes


@pytest.mark.parametrize("seed", range(4))
def test_places_in_use_never_overlap_whatever_the_order(seed):
    chance = random.Random(seed)
    lengths = [chance.randrange(1, 8 * PAGE) for _ in range(12)]
    num_in_flight = 2
    places = BucketAllocator(lengths, torch.float32, num_in_flight)
    used, waiting = [], list(lengths) + [max(lengths)] * num_in_flight
    for _ in range(300):
        if used and (not waiting or chance.random() < 0.5):
            place = used.pop(chance.randrange(len(used)))
            places.free(place)
            waiting.append(place.numel())
        else:
            used.append(places.allocate(waiting.pop(chance.randrange(len(waiting)))))
        ranges = sorted(map(range_of, used))
        assert all(end <= begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))


def test_places_of_common_length_serve_one_after_another_beside_a_long_one():
    places = BucketAllocator([PAGE] * 5 + [3 * PAGE], torch.float32, 1)
    places.allocate(3 * PAGE)  # lasts
    found, taken = set(), [places.allocate(PAGE)]
    for _ in range(8):
        taken.append(places.allocate(PAGE))
        found.update(range_of(place) for place in taken)
        places.free(taken.pop(0))
    assert len(found) == 2


def test_all_but_two_common_places_is_given_back_if_not_in_use():
    places = BucketAllocator([PAGE] * 3 + [4 * PAGE], torch.float32, 1)
    lengths = (PAGE, 4 * PAGE, PAGE, PAGE)
    first, long, second, third = (places.allocate(length).fill_(1) for length in lengths)
    for place in (first, long, second):
        places.free(place)
    places.discard()
    assert third.sum() == PAGE  # in use: stays
    places.free(third)
    places.discard()
    assert [float(places.allocate(n).sum()) for n in (PAGE, PAGE, 4 * PAGE)] == [PAGE, PAGE, 0]
