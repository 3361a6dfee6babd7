"""Places for buckets that come and go: apart from each other, and few."""

import random

import pytest
import torch

from megatron.core.distributed.reusable_places import ReusablePlaces

PAGE = 1024  # elements


def range_of(place):
    return place.data_ptr(), place.data_ptr() + place.nbytes


@pytest.mark.parametrize("seed", range(4))
def test_places_in_use_never_overlap_whatever_the_order(seed):
    chance = random.Random(seed)
    lengths = [chance.randrange(1, 8 * PAGE) for _ in range(12)]
    num_in_flight = 2
    places = ReusablePlaces(lengths, torch.float32, num_in_flight)
    used, waiting = [], list(lengths) + [max(lengths)] * num_in_flight
    for _ in range(300):
        if used and (not waiting or chance.random() < 0.5):
            place = used.pop(chance.randrange(len(used)))
            places.give_back(place)
            waiting.append(place.numel())
        else:
            used.append(places.take(waiting.pop(chance.randrange(len(waiting)))))
        ranges = sorted(map(range_of, used))
        assert all(end <= begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))


def test_a_long_bucket_gets_the_memory_of_short_ones():
    places = ReusablePlaces([PAGE] * 3 + [3 * PAGE], torch.float32, 1)
    short = [places.take(PAGE) for _ in range(3)]
    for place in short:
        places.give_back(place)
    assert range_of(places.take(3 * PAGE)) == (short[0].data_ptr(), range_of(short[2])[1])


def test_what_is_not_in_use_is_given_back():
    places = ReusablePlaces([PAGE] * 3, torch.float32, 1)
    first, second = places.take(PAGE).fill_(1), places.take(PAGE).fill_(2)
    places.give_back(second)
    places.discard()
    assert first.sum() == PAGE
    assert places.take(PAGE).sum() == 0  # fresh pages
    places.give_back(first)
