"""Fetching samples, the order without arrays, and the compiled part against numpy."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset, attention_mask
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.order.blend_order import SpacedOrder
from megatron.core.datasets.order.index_building import _shuffle
from megatron.core.datasets.order.permutation import KeyedPermutation
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import ConfigError, DataError
from tests.unit.datasets import oracle
from tests.unit.datasets.corpora import (
    EOD,
    Tokenizer,
    config,
    gpt_dataset,
    random_documents,
    write_corpus,
)


@pytest.mark.parametrize("size", [0, 1, 2, 31, 32, 33, 34, 65, 5000])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_shuffling_is_that_of_numpy_and_leaves_the_generator_where_numpy_does(
    size, dtype, implementation
):
    ours, theirs = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
    generators = [np.random.RandomState(5) for _ in range(2)]
    for generator in generators:
        generator.normal()  # half of a pair is kept in the state
    for _ in range(3):
        _shuffle(generators[0], ours)
        generators[1].shuffle(theirs)
        assert np.array_equal(ours, theirs)
    assert [g.normal() for g in generators[:1]] == [g.normal() for g in generators[1:]]
    assert generators[0].randint(1 << 30) == generators[1].randint(1 << 30)


@given(size=st.integers(1, 3000), key=st.integers())
@settings(max_examples=60, deadline=None)
def test_a_keyed_permutation_is_one_to_one_and_vectorises(size, key):
    order = KeyedPermutation(size, key, "x")
    whole = order.at(np.arange(size))
    assert sorted(whole.tolist()) == list(range(size))
    assert [order[i] for i in range(0, size, 37)] == whole[::37].tolist()


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_samples_of_every_token_type_equal_the_recipe(tmp_path, dtype, mmap, extra, implementation):
    documents = random_documents(3, 30)
    prefix = write_corpus(tmp_path / "c", documents, dtype)
    corpus = IndexedDataset(prefix, mmap=mmap)
    settings = config(
        sequence_length=11, tokenizer=Tokenizer(pad=42), add_extra_token_to_sequence=extra
    )
    dataset = GPTDataset(corpus, prefix, np.arange(30), 60, Split.train, settings)
    *arrays, epochs, _ = oracle.gpt_indices(
        range(30), [len(d) for d in documents], 11, int(extra), 60, 7
    )
    assert epochs > 1
    found = (dataset.document_index, dataset.sample_index, dataset.shuffle_index)
    assert all(np.array_equal(*pair) for pair in zip(found, arrays, strict=True))
    for i in range(len(dataset)):
        text = oracle.sample_tokens(documents, *arrays[:2], arrays[2][i], int(extra))
        tokens, labels = (text[:-1], text[1:]) if extra else (text, [*text[1:], 42])
        sample = dataset[i]
        assert sample["tokens"].tolist() == [0 if t == 42 else t for t in tokens]
        assert sample["labels"].tolist() == [0 if t == 42 else t for t in labels]
        assert sample["loss_mask"].tolist() == [float(t != 42) for t in labels]


@pytest.mark.parametrize(("bad", "dtype"), [(70000, np.int32), (100, np.uint16), (-3, np.int32)])
@pytest.mark.parametrize("order", ["megatron", "native"])
def test_an_id_outside_the_vocabulary_is_located_in_every_order(
    tmp_path, order, bad, dtype, implementation
):
    documents = [np.arange(50), np.arange(20), np.arange(30)]
    documents[1][13] = bad
    prefix = write_corpus(tmp_path / "c", documents, dtype)
    dataset = gpt_dataset(prefix, sequence_length=9, sample_order=order)
    with pytest.raises(DataError) as caught:
        _ = [dataset[i] for i in range(len(dataset))]
    assert str(caught.value) == (
        f"token {bad} at position 13 of document 1 in {prefix}.bin is outside the vocabulary of "
        "100.\n"
        "  rule:  token ids must be between 0 and the vocabulary size - 1\n"
        "  flags: --data-path, --tokenizer-type, --tokenizer-model, --vocab-size\n"
        "  fix:   train with the tokenizer that the corpus was preprocessed with, or preprocess it "
        "again; if the file is damaged, copy it again"
    )


def windows_of(dataset, epoch=0):
    """Return the samples of an epoch as lists."""
    per_epoch = dataset._order._per_epoch
    samples = [dataset[i] for i in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
    return [s["tokens"].tolist() + s["labels"][-1:].tolist() for s in samples]


@pytest.mark.parametrize("extra", [True, False])
def test_an_epoch_in_native_order_is_every_window_of_the_file_once(tmp_path, extra):
    documents = random_documents(3, 40)
    stream = np.concatenate(documents).tolist()
    prefix = write_corpus(tmp_path / "c", documents)
    settings = {"sample_order": "native", "sequence_length": 11}
    dataset = gpt_dataset(prefix, add_extra_token_to_sequence=extra, **settings)
    count = (len(stream) - extra) // 11
    assert len(dataset) == count
    tokens = [dataset[i]["tokens"].tolist() for i in range(count)]
    assert sorted(tokens) == sorted(stream[k * 11 : k * 11 + 11] for k in range(count))
    assert tokens != [stream[k * 11 : k * 11 + 11] for k in range(count)]
    in_memory = gpt_dataset(documents, add_extra_token_to_sequence=extra, **settings)
    assert [in_memory[i]["tokens"].tolist() for i in range(count)] == tokens


def test_later_native_epochs_cut_the_circle_elsewhere_and_order_it_anew():
    documents = random_documents(3, 40)
    stream = np.concatenate(documents).tolist()
    dataset = gpt_dataset(documents, 10_000, sample_order="native", sequence_length=11)
    assert len(dataset) == 10_000
    seen = set()
    for epoch in range(4):
        windows = windows_of(dataset, epoch)
        begin = dataset._order._epoch[2]
        around = stream[begin:] + stream[:begin] + stream[begin : begin + 1]
        expected = [around[k * 11 : k * 11 + 12] for k in range(len(windows))]
        assert sorted(windows) == sorted(expected)
        seen.add(tuple(map(tuple, windows)))
    assert len(seen) == 4


def test_a_native_split_stays_within_its_documents(tmp_path):
    documents = [np.full(25, number) for number in range(10)]
    prefix = write_corpus(tmp_path / "c", documents)
    parts = BlendedMegatronDatasetBuilder(
        GPTDataset,
        [300, 40, None],
        lambda: True,
        config(blend=([prefix], None), split="6,2,2", sample_order="native"),
    ).build()
    for part, expected in zip(parts, [range(6), range(6, 8), range(8, 10)], strict=True):
        found = torch.cat([part[i]["tokens"] for i in range(len(part))]).unique().tolist()
        assert found == list(expected)
    assert [len(part) for part in parts] == [300, 40, 3]
    assert list(tmp_path.glob("c/**/*")) == [], "nothing is kept on disk"


@pytest.mark.parametrize("order", ["megatron", "native"])
def test_a_partial_validation_sample_is_padded_without_loss(order):
    documents = [np.arange(1, 11)]
    settings = {"split": Split.valid, "sequence_length": 4, "sample_order": order}
    kept = gpt_dataset(documents, drop_last_partial_validation_sequence=False, **settings)
    assert len(gpt_dataset(documents, **settings)) == 2
    last = next(kept[i] for i in range(3) if kept[i]["loss_mask"].sum() < 4)
    assert len(kept) == 3
    assert last["tokens"].tolist() == [9, 10, 0, 0]
    assert last["labels"].tolist() == [10, 0, 0, 0]
    assert last["loss_mask"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_split_shorter_than_a_window_goes_round():
    dataset = gpt_dataset([np.arange(1, 6)], 3, sample_order="native", sequence_length=8)
    for i in range(3):
        tokens = dataset[i]["tokens"].tolist()
        assert [(b - a) % 5 for a, b in zip(tokens, tokens[1:], strict=False)] == [1] * 7


def test_the_native_order_needs_neighbouring_documents_and_a_known_name():
    from tests.unit.datasets.corpora import _InMemory

    corpus = _InMemory(random_documents(0, 5))
    with pytest.raises(ConfigError, match="not contiguous"):
        GPTDataset(corpus, None, np.array([0, 2]), None, Split.train, config(sample_order="native"))
    with pytest.raises(ConfigError, match="sample_order='random'"):
        config(sample_order="random")


def test_native_mock_data_and_pickles_work(tmp_path):
    settings = {"sample_order": "native", "tokenizer": Tokenizer(600, 599), "split": "98,1,1"}
    parts = BlendedMegatronDatasetBuilder(
        MockGPTDataset, [20, 5, 5], lambda: True, config(**settings)
    ).build()
    assert [len(part) for part in parts] == [20, 5, 5]
    prefix = write_corpus(tmp_path / "c", random_documents(5, 3000))
    dataset = gpt_dataset(prefix, 50, sample_order="native")
    again = pickle.loads(pickle.dumps(dataset))
    assert all(torch.equal(again[i]["tokens"], dataset[i]["tokens"]) for i in range(50))


@given(
    raw=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=40),
    size=st.integers(1, 4000),
)
@settings(max_examples=60, deadline=None)
def test_a_spaced_blend_is_even_everywhere_and_grows_without_changing(raw, size):
    weights = np.array(raw) / np.sum(raw)
    datasets, numbers = SpacedOrder(weights, size).arrays()
    taken = np.zeros(len(weights), np.int64)
    rows = np.zeros((size, len(weights)))
    for sample, (d, number) in enumerate(zip(datasets.tolist(), numbers.tolist(), strict=True)):
        assert number == taken[d]
        taken[d] += 1
        rows[sample] = taken
    shares = np.arange(1, size + 1)[:, None] * weights
    # Each count is within 1 of its share at some time within a few samples of this one.
    assert np.abs(rows - shares).max() < 2.0
    order = SpacedOrder(weights, size)
    assert order.totals() == taken.tolist()
    assert order[size // 2] == (datasets[size // 2], numbers[size // 2])
    shorter = SpacedOrder(weights, size // 2 + 1).arrays()[0]
    assert np.array_equal(shorter, datasets[: size // 2 + 1])


def test_a_native_blend_gives_each_dataset_its_share_and_builds_it_that_long(tmp_path):
    prefixes = [
        write_corpus(tmp_path / name, [np.full(90, number)] * 4)
        for number, name in enumerate("abc", 1)
    ]
    train, valid, _ = BlendedMegatronDatasetBuilder(
        GPTDataset,
        [1000, None, 0],
        lambda: True,
        config(blend=(prefixes, [5.0, 3.0, 2.0]), split="1,1", sample_order="native"),
    ).build()
    assert len(train) == 1000
    order = [int(train[i]["tokens"][0]) for i in range(1000)]
    assert [order.count(n) for n in (1, 2, 3)] == [len(d) for d in train.datasets]
    assert [order.count(n) for n in (1, 2, 3)] == pytest.approx([500, 300, 200], abs=1)
    assert len(valid) == sum(len(d) for d in valid.datasets)
    taken = [(d, n) for d, n in zip(*valid._order.arrays(), strict=True)]
    assert len(set(taken)) == len(valid), "every sample of every dataset once"
    assert isinstance(valid, BlendedDataset)


def test_documents_of_a_sample_are_told_apart_without_a_square_mask():
    documents = random_documents(2, 60, longest=6)
    settings = {"reset_attention_mask": True, "reset_position_ids": True}
    square = gpt_dataset(documents, create_attention_mask=True, **settings)
    short = gpt_dataset(documents, document_starts=True, **settings)
    for i in range(len(short)):
        item = short[i]
        assert "attention_mask" not in item
        starts = item["document_starts"]
        assert starts.dtype == torch.int32
        for at, token in enumerate(item["tokens"][:-1].tolist()):
            assert (starts[at + 1] == at + 1) == (token == EOD)
        hidden = (starts[:, None] != starts[None, :]) | torch.ones(16, 16).triu(1).bool()
        assert torch.equal(square[i]["attention_mask"][0], hidden)
        assert torch.equal(item["position_ids"], torch.arange(16) - starts)
    batch = torch.stack([short[i]["document_starts"] for i in range(4)])
    squares = torch.stack([square[i]["attention_mask"] for i in range(4)])
    assert torch.equal(attention_mask(batch), squares)
