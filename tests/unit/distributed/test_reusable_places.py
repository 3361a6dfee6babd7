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


def test_places_of_common_length_serve_one_after_another_beside_a_long_one():
    places = ReusablePlaces([PAGE] * 5 + [3 * PAGE], torch.float32, 1)
    places.take(3 * PAGE)  # lasts
    found, taken = set(), [places.take(PAGE)]
    for _ in range(8):
        taken.append(places.take(PAGE))
        found.update(range_of(place) for place in taken)
        places.give_back(taken.pop(0))
    assert len(found) == 2


def test_all_but_two_common_places_is_given_back_if_not_in_use():
    places = ReusablePlaces([PAGE] * 3 + [4 * PAGE], torch.float32, 1)
    lengths = (PAGE, 4 * PAGE, PAGE, PAGE)
    first, long, second, third = (places.take(length).fill_(1) for length in lengths)
    for place in (first, long, second):
        places.give_back(place)
    places.discard()
    assert third.sum() == PAGE  # in use: stays
    places.give_back(third)
    places.discard()
    assert [float(places.take(n).sum()) for n in (PAGE, PAGE, 4 * PAGE)] == [PAGE, PAGE, 0]
