"""Blends, and the building of train, valid and test."""

import pickle

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.foundation.errors import ConfigError, DataError
from tests.unit.datasets import oracle
from tests.unit.datasets.corpora import (
    config,
    gpt_dataset,
    random_documents,
    write_corpus,
)


@pytest.fixture
def corpora(tmp_path):
    return [
        write_corpus(tmp_path / name, random_documents(seed, count))
        for seed, (name, count) in enumerate([("a", 100), ("b", 50), ("c", 20)])
    ]


def build(sizes, cls=GPTDataset, built=lambda: True, **settings):
    return BlendedMegatronDatasetBuilder(cls, sizes, built, config(**settings)).build()


def test_one_corpus_is_divided_by_documents(corpora):
    parts = build([50, 10, 5], blend=([corpora[0]], None), split="80,15,5")
    documents = [part.indices.tolist() for part in parts]
    assert documents == [list(range(80)), list(range(80, 95)), list(range(95, 100))]
    assert all(isinstance(part, GPTDataset) for part in parts)
    assert [len(part) >= size for part, size in zip(parts, [50, 10, 5], strict=True)] == [True] * 3


def test_a_weighted_blend_follows_the_greedy_rule_and_the_recipe_sizes(corpora):
    weights = [5.0, 3.0, 2.0]
    train, valid, test = build([101, 0, 0], blend=(corpora, weights), split="1")
    assert valid is None
    assert test is None
    normal = [w / 10 for w in weights]
    sizes = [int(np.ceil(101 * w)) for w in normal]
    assert len(train) == sum(sizes) == 103
    assert [d.num_samples for d in train.datasets] == [int(np.ceil(n * 1.005)) for n in sizes]
    datasets, numbers = oracle.blend(normal, 103)
    assert np.array_equal(train.dataset_index, datasets)
    assert np.array_equal(train.dataset_sample_index, numbers)
    item = train[17]
    assert item["dataset_id"] == datasets[17]
    inner = train.datasets[datasets[17]][int(numbers[17])]
    assert torch.equal(item["tokens"], inner["tokens"])


def test_without_weights_corpora_count_by_their_lengths(corpora):
    train, valid, _ = build([60, None, 0], blend=(corpora, None), split="3,1,0")
    lengths = [len(d) for d in train.datasets]
    expected = oracle.blend([n / sum(lengths) for n in lengths], 60)
    assert np.array_equal(train.dataset_index, expected[0])
    lengths = [len(d) for d in valid.datasets]
    assert len(valid) == sum(lengths)
    expected = oracle.blend([n / sum(lengths) for n in lengths], sum(lengths), lengths)
    assert np.array_equal(valid.dataset_index, expected[0])
    assert np.array_equal(valid.dataset_sample_index, expected[1])
    many, _, _ = build([10**6, 0, 0], blend=(corpora, None), split="1")
    assert len(many) == sum(len(d) for d in many.datasets), "no more than there is"


def test_each_part_can_have_its_own_blend(corpora):
    per_split = [(corpora[:2], [1.0, 3.0]), ([corpora[2]], None), None]
    train, valid, test = build([30, 8, 4], blend_per_split=per_split)
    assert [d.dataset_path for d in train.datasets] == corpora[:2]
    assert valid.indices.tolist() == list(range(20))
    assert test is None


def test_validation_sets_can_be_kept_apart(corpora):
    per_split = [([corpora[0]], None), (corpora[1:], None), None]
    _, valid, _ = build([30, 8, 0], blend_per_split=per_split, multiple_validation_sets=True)
    assert [part.dataset_path for part in valid] == corpora[1:]
    assert all(len(part) >= 8 for part in valid)


def test_an_empty_part_that_is_wanted_is_refused_and_otherwise_left_out(corpora):
    with pytest.raises(DataError) as caught:
        build([5, 5, 5], blend=([corpora[2]], None), split="969,30,1")
    assert f"the test part of {corpora[2]} holds none of its 20 documents" in str(caught.value)
    assert "--split 969,30,1" in str(caught.value)
    parts = build([5, 5, 0], blend=([corpora[2]], None), split="969,30,1")
    assert [part is None for part in parts] == [False, False, True]


def test_an_empty_corpus_is_refused_as_such_and_no_share_is_advised(tmp_path):
    IndexedDatasetBuilder(str(tmp_path / "none.bin"), dtype=np.uint16).finalize(
        str(tmp_path / "none.idx")
    )
    with pytest.raises(DataError) as caught:
        build([5, 0, 0], blend=([str(tmp_path / "none")], None), split="1,0,0")
    assert f"the corpus {tmp_path / 'none'} is empty" in str(caught.value)
    assert "--split" not in str(caught.value)


def test_a_blend_that_would_overrun_a_corpus_is_refused(corpora):
    datasets = [gpt_dataset(prefix, 1) for prefix in corpora[:2]]
    size = 40 * len(datasets[0])
    with pytest.raises(DataError) as caught:
        BlendedDataset(datasets, [0.5, 0.5], size, config())
    assert f"the blend takes {size // 2} samples of {corpora[0]}" in str(caught.value)
    assert "--mid-level-dataset-surplus" in str(caught.value)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(corpora, weight):
    with pytest.raises(ConfigError, match=f"weight {weight} of a blend is not a positive number"):
        build([5, 0, 0], blend=(corpora, [1.0, weight, 1.0]))


def test_bad_sizes_are_refused(corpora):
    with pytest.raises(ConfigError, match="2 datasets with 1 weights"):
        BlendedDataset([gpt_dataset(p) for p in corpora[:2]], [1.0], 5, config())
    with pytest.raises(ConfigError, match="sizes"):
        build([5, 0])


def test_a_long_blend_is_cached_and_pickled_by_name(corpora, tmp_path, everything_is_kept):
    settings = {"blend": (corpora, None), "path_to_cache": str(tmp_path / "cache")}
    train, _, _ = build([None, 0, 0], **settings)
    assert len(list((tmp_path / "cache").glob("*-BlendedDataset-train-counts.npy"))) == 1
    again, _, _ = build([None, 0, 0], **settings)
    assert isinstance(again._table, np.memmap)
    assert np.array_equal(again.dataset_index, train.dataset_index)
    copy = pickle.loads(pickle.dumps(again))
    assert torch.equal(copy[3]["tokens"], train[3]["tokens"])
    assert train[None]["loss_mask"].sum() == 0
