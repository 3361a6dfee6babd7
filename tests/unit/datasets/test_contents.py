"""A corpus is known by its contents, and a change under a run is noticed."""

import os
import time

import numpy as np
import pytest

from megatron.core.datasets.corpus import contents
from megatron.core.datasets.corpus.files import list_of_parts, parts_path
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import DataError
from tests.unit.datasets.corpora import Tokenizer, config, write_corpus

DOCUMENTS = [np.arange(200) + number for number in range(300)]  # 120,000 bytes


def overwrite(path, offset, data):
    """Write into a file as it is, with a new time: the clock of files may be coarse."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
    later = time.time() + 5
    os.utime(path, (later, later))


def test_any_byte_of_a_small_corpus_changes_its_digest(tmp_path):
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    before = IndexedDataset(prefix).contents_digest()
    size = os.path.getsize(prefix + ".bin")
    for offset in np.random.RandomState(0).randint(0, size, 40):
        with open(prefix + ".bin", "r+b") as file:
            file.seek(offset)
            (old,) = file.read(1)
            file.seek(offset)
            file.write(bytes([old ^ 1]))
        assert IndexedDataset(prefix).contents_digest() != before
        overwrite(prefix + ".bin", offset, bytes([old]))
    assert IndexedDataset(prefix).contents_digest() == before


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 64 * 4096, 10_000_000])
def test_pages_cover_a_small_file_and_both_ends_of_a_large_one(size):
    read = []

    def read_page(count, offset):
        read.append((offset, offset + count))
        return bytes(count)

    contents.sampled_digest(read_page, size)
    assert len(read) <= 64
    assert read[0][0] == 0
    assert read[-1][1] == size
    if size <= 64 * 4096:
        assert all(begin <= end for (_, end), (begin, _) in zip(read, read[1:], strict=False))


def test_documents_of_the_same_lengths_with_other_tokens_have_another_digest(tmp_path):
    documents = [np.arange(9_000) for _ in range(300)]  # 5.4 MB: sampled
    one = IndexedDataset(write_corpus(tmp_path / "a", documents))
    other = IndexedDataset(write_corpus(tmp_path / "b", [d + 1 for d in documents]))
    assert one.shape_digest() == other.shape_digest()
    assert one.contents_digest() != other.contents_digest()


def opened(tmp_path, kind):
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    if kind == "parts":
        second = write_corpus(tmp_path / "d", DOCUMENTS)
        os.rename(prefix + ".bin", tmp_path / "first.bin")
        joined = list_of_parts(prefix + ".bin", [str(tmp_path / "first.bin"), second + ".bin"])
        with open(parts_path(prefix + ".bin"), "wb") as file:
            file.write(joined)
        builder_index = write_corpus(tmp_path / "whole", DOCUMENTS * 2)
        os.replace(builder_index + ".idx", prefix + ".idx")
        return prefix, second + ".bin"
    return prefix, prefix + ".bin"


@pytest.fixture
def no_wait(monkeypatch):
    monkeypatch.setattr(contents, "_INTERVAL_S", 0.0)


@pytest.mark.parametrize("kind", ["mapped", "positioned", "parts"])
@pytest.mark.usefixtures("no_wait")
def test_contents_that_are_written_into_a_corpus_in_use_end_the_run(tmp_path, kind):
    prefix, token_file = opened(tmp_path, kind)
    corpus = IndexedDataset(prefix, mmap=kind != "positioned")
    corpus[5]
    later = time.time() + 5
    os.utime(token_file, (later, later))
    corpus[6]
    overwrite(token_file, 0, bytes(50_000))
    with pytest.raises(DataError, match="was written to while this run read it") as caught:
        corpus[7]
    assert token_file in str(caught.value)
    assert "older than the change" in str(caught.value)


@pytest.mark.parametrize("mmap", [True, False], ids=["compiled reader", "numpy reader"])
@pytest.mark.parametrize("sample_order", ["megatron", "native"])
@pytest.mark.usefixtures("no_wait")
def test_samples_of_a_corpus_that_is_written_to_end_the_run(tmp_path, sample_order, mmap):
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    corpus = IndexedDataset(prefix, mmap=mmap)
    settings = config(sample_order=sample_order, tokenizer=Tokenizer(vocab_size=1000))
    dataset = GPTDataset(corpus, prefix, np.arange(len(corpus)), 50, Split.train, settings)
    dataset[0]
    overwrite(prefix + ".bin", 0, bytes(os.path.getsize(prefix + ".bin")))
    with pytest.raises(DataError, match="was written to"):
        dataset[1]


@pytest.mark.usefixtures("no_wait")
def test_a_corpus_that_is_cut_is_noticed_before_a_page_beyond_its_end_is_read(tmp_path):
    prefix, token_file = opened(tmp_path, "mapped")
    corpus = IndexedDataset(prefix)
    corpus.read_tokens(0, 10)
    os.truncate(token_file, 0)
    with pytest.raises(DataError, match="was written to"):
        corpus.read_tokens(50_000, 10)


@pytest.mark.usefixtures("no_wait")
def test_a_corpus_that_is_replaced_under_its_name_stays_what_was_opened(tmp_path):
    prefix, token_file = opened(tmp_path, "mapped")
    corpus = IndexedDataset(prefix)
    before = corpus[9].tolist()
    other = write_corpus(tmp_path / "other", [d + 1 for d in DOCUMENTS])
    os.replace(other + ".bin", token_file)
    assert corpus[9].tolist() == before
    os.unlink(token_file)
    assert corpus[9].tolist() == before


def test_a_look_at_files_is_taken_twice_a_second_at_most(tmp_path, monkeypatch):
    prefix, _ = opened(tmp_path, "mapped")
    corpus = IndexedDataset(prefix)
    looks = []
    real = os.stat
    monkeypatch.setattr(contents.os, "stat", lambda path: looks.append(path) or real(path))
    begin = time.monotonic()
    for number in range(200):
        corpus[number]
    assert len(looks) <= 2 * (1 + (time.monotonic() - begin) / contents._INTERVAL_S)
