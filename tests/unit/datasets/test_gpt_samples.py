"""What a GPT sample holds, and the documents and pads it is made of."""

import pickle

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import MockGPTDataset, MockTokens
from megatron.core.foundation.errors import ConfigError
from tests.unit.datasets.corpora import (
    EOD,
    Tokenizer,
    config,
    gpt_dataset,
    random_documents,
    write_corpus,
)


def test_an_item_has_the_types_and_shapes_that_the_loop_expects():
    item = gpt_dataset(random_documents(0, 20), create_attention_mask=True)[0]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in item.items()} == {
        "tokens": (torch.int64, (16,)),
        "labels": (torch.int64, (16,)),
        "attention_mask": (torch.bool, (1, 16, 16)),
        "loss_mask": (torch.float32, (16,)),
        "position_ids": (torch.int64, (16,)),
    }
    assert torch.equal(~item["attention_mask"][0], torch.ones(16, 16).tril().bool())
    assert "attention_mask" not in gpt_dataset(random_documents(0, 20))[0]


def slow_masks(tokens, reset_positions, reset_mask, mask_eod):
    """Masks and positions of one sample, token by token."""
    s = len(tokens)
    document, documents, positions, position = 0, [], [], 0
    for token in tokens:
        documents.append(document)
        positions.append(position)
        position += 1
        if token == EOD:
            document += 1
            position = 0 if reset_positions else position
    allowed = [
        [j <= i and (not reset_mask or documents[i] == documents[j]) for j in range(s)]
        for i in range(s)
    ]
    loss = [0.0 if mask_eod and token == EOD else 1.0 for token in tokens]
    return allowed, positions, loss


@pytest.mark.parametrize("reset_positions", [False, True])
@pytest.mark.parametrize("reset_mask", [False, True])
@pytest.mark.parametrize("mask_eod", [False, True])
def test_resets_at_document_ends_equal_a_slow_walk(reset_positions, reset_mask, mask_eod):
    dataset = gpt_dataset(
        random_documents(1, 60, longest=9),
        create_attention_mask=True,
        reset_position_ids=reset_positions,
        reset_attention_mask=reset_mask,
        eod_mask_loss=mask_eod,
    )
    seen = 0
    for i in range(len(dataset)):
        item = dataset[i]
        tokens = item["tokens"].tolist()
        seen += tokens.count(EOD)
        allowed, positions, loss = slow_masks(tokens, reset_positions, reset_mask, mask_eod)
        assert (~item["attention_mask"][0]).tolist() == allowed
        assert item["position_ids"].tolist() == positions
        assert item["loss_mask"].tolist() == loss
    assert seen > 20


def test_resets_without_an_end_token_are_refused():
    with pytest.raises(ConfigError) as caught:
        gpt_dataset(random_documents(1, 9), reset_position_ids=True, tokenizer=Tokenizer(eod=None))
    assert "Tokenizer has no end-of-document token, which reset_position_ids" in str(caught.value)
    assert "--reset-position-ids" in str(caught.value)
    assert len(gpt_dataset(random_documents(1, 9), tokenizer=Tokenizer(eod=None))[0]) == 4


def test_a_pad_id_that_is_also_the_end_of_document_masks_only_padding():
    documents = [np.array([5, EOD, 6, EOD, 7])]
    item = gpt_dataset(documents, sequence_length=4, tokenizer=Tokenizer(pad=EOD))[0]
    assert item["tokens"].tolist() == [5, EOD, 6, EOD]
    assert item["loss_mask"].tolist() == [1.0] * 4
    item = gpt_dataset(
        documents,
        sequence_length=4,
        tokenizer=Tokenizer(pad=EOD),
        allow_ambiguous_pad_tokens=False,
    )[0]
    assert item["tokens"].tolist() == [5, 0, 6, 0], "Megatron's default, on request"
    assert item["loss_mask"].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_a_sample_that_fills_a_batch_has_no_loss():
    dataset = gpt_dataset(random_documents(0, 20))
    item = dataset[None]
    assert item["loss_mask"].sum() == 0
    assert item["tokens"].shape == (16,)


def test_a_pickled_dataset_names_its_files_instead_of_copying_them(tmp_path, everything_is_kept):
    prefix = write_corpus(tmp_path / "c", random_documents(5, 3000))
    dataset = gpt_dataset(prefix)
    assert sum(a.nbytes for a in (dataset.sample_index, dataset.shuffle_index)) > 20_000
    packed = pickle.dumps(dataset)
    assert len(packed) < 18_000, "the int32 document range is all that travels"
    again = pickle.loads(packed)
    assert all(torch.equal(again[i]["tokens"], dataset[i]["tokens"]) for i in range(20))


def test_mock_documents_stay_inside_any_vocabulary():
    for vocab_size in (33, 258, 50257):
        corpus = MockTokens(Tokenizer(vocab_size, eod=vocab_size - 1))
        longest = int(corpus.sequence_lengths.argmax())
        tokens = corpus.get(longest)
        assert tokens.min() > 0
        assert tokens.max() == vocab_size - 1 == tokens[-1]
        assert corpus.get(longest, 3, 5).tolist() == tokens[3:8].tolist()


def test_without_blend_and_split_the_data_is_mock_data_in_equal_parts():
    settings = config(split=None)
    assert settings.mock
    assert settings.split == "1,1,1"
    sizes = [10, 10, 10]
    parts = BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, settings).build()
    counts = [len(part.indices) for part in parts]
    assert max(counts) - min(counts) <= 1


def test_a_config_that_does_not_say_what_a_sample_is_is_refused():
    with pytest.raises(ConfigError, match="without tokenizer, reset_position_ids"):
        config(tokenizer=None, reset_position_ids=None)
    with pytest.raises(ConfigError, match="no attention mask is made"):
        config(reset_attention_mask=True)
    with pytest.raises(ConfigError, match="not how to divide it"):
        config(blend=(["a"], None), split=None)
    with pytest.raises(ConfigError, match="for all parts together and for each part"):
        config(blend=(["a"], None), blend_per_split=[(["b"], None), None, None])
    with pytest.raises(ConfigError, match="sequence_length=0"):
        config(sequence_length=0)
