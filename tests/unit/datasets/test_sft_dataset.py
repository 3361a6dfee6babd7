"""Packed conversations as samples."""

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.sft_dataset import SFTDataset
from megatron.core.foundation.errors import DataError
from tests.unit.datasets.corpora import config

PACKS = [[[11, 12, 13, 14], [21, 22, 23]], [[31, 32]], [[41, 42, 43, 44, 45, 46, 47, 48]]]
MASKS = [[[0, 0, 1, 1], [0, 1, 1]], [[0, 1]], [[0, 0, 0, 0, 0, 0, 1, 1]]]


def write(folder, packs=PACKS, masks=MASKS):
    for name, documents, dtype in (("c", packs, np.uint16), ("c_mask", masks, np.uint8)):
        with IndexedDatasetBuilder(f"{folder / name}.bin", dtype=dtype) as builder:
            for document in documents:
                builder.add_document(np.concatenate(document), [len(one) for one in document])
            builder.finalize(f"{folder / name}.idx")
    return str(folder / "c")


def dataset(prefix, size=None, **settings):
    settings = {"sequence_length": 8, "blend": ([prefix], None), "split": "1", **settings}
    sizes = [size, 0, 0]
    return BlendedMegatronDatasetBuilder(
        SFTDataset, sizes, lambda: True, config(**settings)
    ).build()[0]


def test_a_pack_is_one_sample_and_each_conversation_stands_alone(tmp_path):
    samples = dataset(write(tmp_path), create_attention_mask=True)
    assert len(samples) == 3
    found = {int(item["tokens"][0]): item for item in map(samples.__getitem__, range(3))}
    two = found[11]
    assert two["tokens"].tolist() == [11, 12, 13, 14, 21, 22, 23, 0]
    assert two["labels"].tolist() == [12, 13, 14, 21, 22, 23, 0, 0]
    assert two["loss_mask"].tolist() == [0, 1, 1, 0, 1, 1, 0, 0]
    assert two["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert two["document_starts"].tolist() == [0, 0, 0, 0, 4, 4, 4, 7]
    blocks = torch.block_diag(*(torch.ones(n, n).tril() for n in (4, 3, 1))).bool()
    assert torch.equal(~two["attention_mask"][0], blocks)
    assert found[31]["loss_mask"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert found[41]["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
    assert samples[None]["loss_mask"].sum() == 0


def test_every_epoch_gives_each_pack_once_in_its_own_order(tmp_path):
    packs = [[[n, n]] for n in range(1, 21)]
    samples = dataset(write(tmp_path, packs, [[[0, 1]]] * 20), 60)
    order = [int(samples[i]["tokens"][0]) for i in range(60)]
    epochs = [order[:20], order[20:40], order[40:]]
    assert all(sorted(epoch) == list(range(1, 21)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_what_does_not_fit_is_refused(tmp_path):
    prefix = write(tmp_path)
    with pytest.raises(DataError, match="document 2 of .* is a pack of 8 tokens"):
        dataset(prefix, sequence_length=7)
    with pytest.raises(DataError, match="outside the vocabulary of 40"):
        _ = [item["tokens"] for item in map(dataset(prefix, vocab_size=40).__getitem__, range(3))]
    write(tmp_path, masks=[*MASKS[:2], [[0, 1]]])
    with pytest.raises(DataError, match="differ in their sequence_lengths"):
        dataset(prefix)
    (tmp_path / "c_mask.bin").unlink()
    with pytest.raises(DataError, match="c_mask.bin not found"):
        dataset(prefix)
