"""Corpora behind a URL: the same tokens, fetched once, from a folder that is never trusted."""

import pickle

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron.core.datasets.corpus import object_store
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.foundation.errors import ConfigError, DataError
from tests.unit.datasets.corpora import config, gpt_dataset, random_documents, write_corpus


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in memory, blocks of 64 bytes, and the ranges that were asked of it."""
    monkeypatch.setattr(object_store, "BLOCK_BYTES", 64)
    system = fsspec.filesystem("memory")
    system.store.clear()
    asked = []
    honest = type(system).cat_file

    def cat_file(self, path, start=None, end=None, **named):
        asked.append((path, start, end))
        return honest(self, path, start=start, end=end, **named)

    monkeypatch.setattr(type(system), "cat_file", cat_file)
    prefix = write_corpus(tmp_path / "c", random_documents(3, 40))
    for suffix in (".bin", ".idx"):
        system.put(prefix + suffix, f"memory://bucket/c{suffix}")
    return asked


def opened(tmp_path):
    return IndexedDataset("memory://bucket/c", object_storage_cache=str(tmp_path / "cache"))


def test_a_corpus_in_a_store_reads_as_the_file_does_and_each_block_is_fetched_once(tmp_path, store):
    file = IndexedDataset(str(tmp_path / "c"))
    corpus = opened(tmp_path)
    for number in [*range(39, -1, -1), *range(40)]:
        assert np.array_equal(corpus[number], file[number])
    assert np.array_equal(corpus.read_tokens(0, 500), file.read_tokens(0, 500))
    blocks = [request for request in store if request[0].endswith(".bin")]
    assert len(blocks) == len(set(blocks)) <= -(-2 * int(file.sequence_lengths.sum()) // 64)
    store.clear()
    again = pickle.loads(pickle.dumps(opened(tmp_path)))
    assert again.shape_digest() == file.shape_digest()
    assert again.contents_digest() == opened(tmp_path).contents_digest()
    assert all(np.array_equal(again[n], file[n]) for n in range(40))
    assert store == [], "the second run reads the local copies"


def test_damaged_local_copies_are_fetched_again(tmp_path, store):
    expected = opened(tmp_path).read_tokens(0, 100).tolist()
    kept = sorted(p for p in (tmp_path / "cache").glob("*/0*") if p.is_file())
    assert kept
    kept[0].write_bytes(b"x" + kept[0].read_bytes()[1:])
    kept[1].write_bytes(kept[1].read_bytes()[:-9])
    store.clear()
    assert opened(tmp_path).read_tokens(0, 100).tolist() == expected
    assert len(store) == 2


def test_an_object_that_was_replaced_does_not_find_the_old_copies(tmp_path, store):
    opened(tmp_path).read_tokens(0, 100)
    documents = [np.full(len(d), 7) for d in random_documents(3, 40)]
    prefix = write_corpus(tmp_path / "d", documents)
    system = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx"):
        system.rm(f"/bucket/c{suffix}")
        system.put(prefix + suffix, f"memory://bucket/c{suffix}")
    assert set(opened(tmp_path).read_tokens(0, 100).tolist()) == {7}


@pytest.mark.parametrize("order", ["megatron", "native"])
def test_samples_from_a_store_equal_those_of_the_file(tmp_path, store, order):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset

    settings = config(
        blend=(["memory://bucket/c"], None),
        object_storage_cache_path=str(tmp_path / "cache"),
        sample_order=order,
    )
    there = BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, settings).build()[0]
    here = gpt_dataset(str(tmp_path / "c"), 50, sample_order=order)
    assert all(torch.equal(there[i]["tokens"], here[i]["tokens"]) for i in range(50))
    batches = DataLoader(there, batch_size=10, num_workers=1)
    tokens = torch.cat([batch["tokens"] for batch in batches])[:50]
    assert torch.equal(tokens, torch.stack([here[i]["tokens"] for i in range(50)]))


def test_what_is_missing_is_said(tmp_path, store):
    with pytest.raises(ConfigError, match="no folder for local copies"):
        IndexedDataset("memory://bucket/c")
    with pytest.raises(DataError, match="memory://bucket/nothing.bin cannot be read: FileNotFound"):
        IndexedDataset("memory://bucket/nothing", object_storage_cache=str(tmp_path))
    with pytest.raises(DataError, match="cannot be read: ValueError"):
        IndexedDataset("nosuchstore://bucket/c", object_storage_cache=str(tmp_path))
    fsspec.filesystem("memory").pipe("/bucket/c.bin", b"1234")
    with pytest.raises(DataError, match="byte 4: found a file of 4 bytes"):
        opened(tmp_path)
