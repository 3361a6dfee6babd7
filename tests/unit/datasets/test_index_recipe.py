"""The index and blend arrays are those of the recipe."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.order.index_building import (
    build_sample_index,
    build_shuffle_index,
    document_ids,
    plan_epochs,
    split_boundaries,
    split_bounds,
)
from megatron.core.datasets.utils import get_blend_from_list, normalize
from megatron.core.foundation.errors import ConfigError, DataError
from tests.unit.datasets import oracle, recipe_cases
from tests.unit.datasets.recipe_cases import greedy_blend


def test_200_random_corpora_and_200_random_blends_equal_the_recipe(implementation):
    corpora, blends = recipe_cases.run(200)
    assert corpora.total() == blends.total() == 200
    assert len(corpora) == 12, "every kind of epoch, extra token and tail must occur"
    assert len(blends) == 2


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    seq_length=st.integers(1, 20),
    extra=st.integers(0, 1),
    num_samples=st.one_of(st.none(), st.integers(1, 90)),
    drop_last=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_sample_starts_equal_a_walk_through_the_documents(
    lengths, seq_length, extra, num_samples, drop_last
):
    lengths = np.array(lengths, np.int32)
    docs = np.arange(len(lengths), dtype=np.int32)
    documents, samples, _, _, _ = oracle.gpt_indices(
        docs, lengths, seq_length, extra, num_samples, 3, drop_last=drop_last
    )
    plan = plan_epochs(int(lengths.sum()), seq_length, extra, num_samples)
    fast = build_sample_index(lengths, documents, plan, drop_last=drop_last)
    assert np.array_equal(fast, samples)


@given(
    raw=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=10),
    size=st.integers(1, 3000),
)
@settings(max_examples=40, deadline=None)
def test_blends_of_any_weights_equal_the_greedy_rule(raw, size):
    weights = np.array(normalize(raw))
    for fast, slow in zip(
        greedy_blend(weights, size), oracle.blend(weights.tolist(), size), strict=True
    ):
        assert np.array_equal(fast, slow)


def test_an_exhaustive_blend_takes_every_sample_once():
    sizes = np.array([7, 1000, 1, 350])
    datasets, numbers = greedy_blend(sizes / sizes.sum(), int(sizes.sum()), capacities=sizes)
    for dataset, size in enumerate(sizes):
        assert np.array_equal(np.sort(numbers[datasets == dataset]), np.arange(size))


def test_the_last_epoch_stands_apart_only_when_little_of_it_is_needed():
    # 10 samples an epoch: 13 need 3 of the second, 19 need 9.
    assert plan_epochs(101, 10, 1, 13).separate_final_epoch
    assert not plan_epochs(101, 10, 1, 19).separate_final_epoch
    assert not plan_epochs(101, 10, 1, None).separate_final_epoch
    plan = plan_epochs(101, 10, 1, 13)
    order = build_shuffle_index(plan.num_samples(), plan, np.random.RandomState(0))
    assert set(order[:10].tolist()) == set(range(10))


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


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(weight):
    with pytest.raises(ConfigError, match="of a blend is not a positive number"):
        normalize([1.0, weight])
