"""The index and blend arrays are those of the recipe."""

import numpy as np
import pytest

from megatron.core.datasets.order.index_building import (
    document_ids,
    split_boundaries,
    split_bounds,
)
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.foundation.errors import DataError
from tests.unit.datasets import recipe_cases


def test_200_random_corpora_and_200_random_blends_equal_the_recipe(implementation):
    corpora, blends = recipe_cases.run(200)
    assert corpora.total() == blends.total() == 200
    assert len(corpora) == 12, "every kind of epoch, extra token and tail must occur"
    assert len(blends) == 2


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969, 30, 1", [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]),
        ("1,1", [(0.0, 0.5), (0.5, 1.0), None]),
        ("100,0,0", [(0.0, 1.0), None, None]),
        ("0,0,2.5", [None, None, (0.0, 1.0)]),
        ("90-10", [(0.0, 0.9), (0.9, 1.0), None]),
    ],
)
def test_split_strings_become_shares(text, shares):
    assert split_boundaries(text) == shares


@pytest.mark.parametrize("text", ["", "none", "0,0,0", "1,2,3,4", "1.2.3"])
def test_bad_split_strings_are_refused(text):
    with pytest.raises(DataError, match="does not name the shares of train, valid and test") as e:
        split_boundaries(text)
    assert "--split 99,1,0" in str(e.value)


def test_split_bounds_are_rounded_half_to_even():
    assert len(split_bounds((0.0, 0.5), 5)) == 2
    assert len(split_bounds((0.0, 0.5), 7)) == 4
    assert document_ids(split_bounds((0.5, 1.0), 5)).dtype == np.int32
    parts = [split_bounds(share, 997) for share in split_boundaries("8,1,1")]
    assert np.concatenate(parts).tolist() == list(range(997))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None),
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["0.3", "a", "7", "b"], (["a", "b"], [0.3, 7.0])),
        (["1", "a", "b"], (["1", "a", "b"], None)),
        (["1", "a", "b", "2"], (["1", "a", "b", "2"], None)),
        ([" 1 ", " a "], (["a"], [1.0])),
    ],
)
def test_data_paths_are_prefixes_or_weights_and_prefixes(given, read):
    assert get_blend_from_list(given) == read
