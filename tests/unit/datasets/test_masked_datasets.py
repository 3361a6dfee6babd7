"""Samples of encoders: which words are hidden, and that nothing but seed and number decides it."""

import numpy as np
import pytest
import torch

from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.masked_dataset import continues_word
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.tokenizers.megatron_tokenizer import make_tokenizer
from tests.parity.encoder_case import write_vocabulary

LENGTH = 64


class Sentences:
    """A corpus in memory: each document a list of sentences."""

    def __init__(self, documents):
        self.sentences = [np.array(s) for document in documents for s in document]
        self.document_indices = np.cumsum([0, *map(len, documents)])
        self.sequence_lengths = np.array([len(s) for s in self.sentences], np.int32)

    def get(self, idx):
        return self.sentences[idx]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    file = write_vocabulary(tmp_path_factory.mktemp("vocabulary"))
    return make_tokenizer("BertWordPieceLowerCase", vocab_file=str(file))


def bert(tokenizer, documents=None, num_samples=200, **settings):
    config = BERTMaskedWordPieceDatasetConfig(
        **{"random_seed": 5, "sequence_length": LENGTH, "tokenizer": tokenizer, **settings}
    )
    corpus = Sentences(documents) if documents else None
    if corpus is None:
        corpus = BERTMaskedWordPieceDataset.build_low_level_dataset(None, config)
    count = BERTMaskedWordPieceDataset.numel_low_level_dataset(corpus)
    return BERTMaskedWordPieceDataset(corpus, None, range(count), num_samples, Split.train, config)


def restored(sample):
    """Return the text without what hides it."""
    return torch.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])


def test_a_sample_is_what_it_was_whenever_and_by_whomever_it_is_read(tokenizer):
    first, second = bert(tokenizer), bert(tokenizer)
    backwards = {i: second[i] for i in reversed(range(20))}
    for i in range(20):
        for name, value in first[i].items():
            assert np.array_equal(value, backwards[i][name]), (i, name)
    other = bert(tokenizer, random_seed=6)
    assert not torch.equal(first[0]["text"], other[0]["text"])


def test_an_epoch_holds_every_sentence_once(tokenizer):
    # Tokens that occur once: which sentences a sample is made of can be read from it.
    documents = [[[31 + 3 * d + s] * 3 for s in range(3)] for d in range(10)]
    found = bert(
        tokenizer, documents, num_samples=None, short_sequence_probability=0.0, sequence_length=8,
        classification_head=False,
    )  # fmt: skip
    assert len(found) == 20  # runs of two sentences and of one
    tokens = torch.cat([restored(found[i]) for i in range(len(found))])
    counts = torch.bincount(tokens, minlength=96)
    assert counts[31:61].tolist() == [3] * 30


def test_whole_words_are_hidden_and_about_as_many_as_asked(tokenizer):
    data = bert(tokenizer, masking_probability=0.2)
    pieces = torch.from_numpy(continues_word(tokenizer, tokenizer.vocab_size))
    hidden = total = shown_as_mask = 0
    for i in range(100):
        sample = data[i]
        text, mask = restored(sample), sample["loss_mask"].bool()
        special = (text == tokenizer.cls) | (text == tokenizer.sep) | (text == tokenizer.pad)
        joined = pieces[text[1:]] & ~special[:-1]  # a piece has the fate of the token before it
        assert torch.equal(mask[1:][joined], mask[:-1][joined])
        assert not (mask & special & (sample["padding_mask"] == 0)).any()
        hidden, total = hidden + int(mask.sum()), total + int((~special).sum())
        shown_as_mask += int((sample["text"][mask] == tokenizer.mask).sum())
    assert hidden / total == pytest.approx(0.2, abs=0.02)
    assert shown_as_mask / hidden == pytest.approx(0.8, abs=0.05)


def test_no_token_is_beyond_the_classes_of_the_model(tokenizer):
    data = bert(tokenizer, vocab_size=61)
    largest = max(int(data[i]["text"].max()) for i in range(200))
    assert 55 < largest < 61 < tokenizer.vocab_size


def test_pieces_that_trade_places_are_said_to(tokenizer):
    documents = [[[40 + i] * 4, [60 + i] * 4] for i in range(10)]
    data = bert(tokenizer, documents, num_samples=40, short_sequence_probability=0.0)
    said = set()
    for i in range(40):
        sample = data[i]
        text, types = restored(sample), sample["types"]
        first = int(text[1])
        assert (first >= 60) == bool(sample["is_random"])
        assert types.tolist() == [0] * 6 + [1] * 5 + [0] * (LENGTH - 11)
        assert sample["padding_mask"].sum() == 11
        said.add(sample["is_random"])
    assert said == {0, 1}


def test_a_long_text_is_cut_to_the_length_of_a_sample(tokenizer):
    data = bert(tokenizer, [[list(range(31, 91))] * 2] * 3, short_sequence_probability=0.0)
    for i in range(6):
        sample = data[i]
        assert sample["truncated"] == 1
        assert sample["padding_mask"].all()
        assert (restored(sample) == tokenizer.sep).sum() == 2


@pytest.fixture(scope="module")
def with_sentinels(tmp_path_factory):
    file = write_vocabulary(tmp_path_factory.mktemp("vocabulary"))
    return make_tokenizer("BertWordPieceLowerCase", vocab_file=str(file), vocab_extra_ids=12)


def t5(tokenizer, **settings):
    config = T5MaskedWordPieceDatasetConfig(
        **{"random_seed": 5, "sequence_length": LENGTH, "sequence_length_decoder": 48,
           "tokenizer": tokenizer, "short_sequence_probability": 0.2, **settings}
    )  # fmt: skip
    corpus = Sentences([[[57 + (7 * d + s) % 36] * 9 for s in range(9)] for d in range(20)])
    return T5MaskedWordPieceDataset(corpus, None, range(20), 100, Split.train, config)


def filled(sample, tokenizer):
    """Put the spans that the decoder writes in the place of their sentinels."""
    spans, current = {}, []
    for token in sample["labels"][sample["loss_mask"] == 1].tolist():
        if token in tokenizer.additional_special_tokens_ids:
            current = spans.setdefault(token, [])
        elif token != tokenizer.eos:
            current.append(token)
    text = sample["text_enc"][sample["enc_mask"] == 1].tolist()
    return [token for shown in text for token in spans.get(shown, [shown])], spans


def test_the_decoder_writes_what_sentinels_stand_for(with_sentinels):
    plain = t5(with_sentinels, masking_probability=0.0)
    hidden = t5(with_sentinels, masking_probability=0.3)
    share = []
    for i in range(60):
        sample = hidden[i]
        text, spans = filled(sample, with_sentinels)
        assert text == filled(plain[i], with_sentinels)[0]
        assert list(spans) == with_sentinels.additional_special_tokens_ids[: len(spans)]
        assert sample["text_dec"][0] == with_sentinels.bos
        count = int(sample["dec_mask"].sum())
        assert torch.equal(sample["text_dec"][1:count], sample["labels"][: count - 1])
        assert sample["labels"][count - 1] == with_sentinels.eos
        share.append(sum(map(len, spans.values())) / len(text))
    assert np.mean(share) == pytest.approx(0.3, abs=0.03)


def test_spans_end_where_sentinels_or_the_length_of_the_decoder_do(with_sentinels):
    for sample in (t5(with_sentinels, sequence_length_decoder=6)[i] for i in range(30)):
        assert sample["dec_mask"].sum() <= 6
        _, spans = filled(sample, with_sentinels)
        assert sum(1 + len(span) for span in spans.values()) <= 5
    file_without = make_tokenizer("ByteTokenizer")
    with pytest.raises(DataError, match="no bos token"):
        t5(file_without)


def test_mistakes_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        bert(tokenizer, masking_probability=1.5)
    with pytest.raises(ConfigError, match="masking_do_permutation"):
        bert(tokenizer, masking_do_permutation=True)
    with pytest.raises(DataError, match="no document of 2 sentences"):
        bert(tokenizer, [[[40] * 9]])
    with pytest.raises(DataError, match="outside the vocabulary"):
        bert(tokenizer, [[[400] * 9] * 2])[0]
    with pytest.raises(DataError, match="no sentinels"):
        t5(tokenizer)
    with pytest.raises(DataError, match="no cls token"):
        bert(make_tokenizer("NullTokenizer", vocab_size=100))
