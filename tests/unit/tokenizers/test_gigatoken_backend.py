"""The fast backend gives the ids of the tokenizer's own library, or it is not used."""

import random

import numpy as np
import pytest

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.tokenizers import gigatoken_backend, make_tokenizer
from megatron.core.tokenizers.gigatoken_backend import (
    PROBES,
    GigatokenEngine,
    TokenizerBackend,
    difference,
    make_engine,
)


@pytest.fixture(params=["gpt2", "tokenizer.json", "pieces", "llama2", "ranks"])
def tokenizer(request, bpe_folder, piece_model, rank_file):
    if request.param == "gpt2":
        return make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(bpe_folder))
    if request.param == "tokenizer.json":
        return make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(bpe_folder))
    if request.param == "pieces":
        return make_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=piece_model)
    if request.param == "llama2":
        return make_tokenizer("Llama2Tokenizer", tokenizer_model=piece_model)
    return make_tokenizer("TikTokenizer", tokenizer_model=rank_file, tiktoken_pattern="gpt2")


def random_texts(count):
    """Texts of characters that matter to a cut: letters, digits, spaces, scripts, controls."""
    source = random.Random(5)
    alphabet = "ab Z'sté19 \n\t.,_-(<|>)漢字ñ👍🏽\u0301\u00a0\u2003\r0" + "thequick " * 3
    return ["".join(source.choices(alphabet, k=source.randrange(60))) for _ in range(count)]


def test_gigatoken_gives_the_ids_of_the_library(tokenizer, sonnets):
    engine, reason = make_engine(tokenizer, TokenizerBackend.gigatoken)
    assert isinstance(engine, GigatokenEngine)
    assert "ids equal on" in reason
    texts = [*PROBES, *random_texts(300), *sonnets.split("\n\n")]
    assert difference(engine, tokenizer, texts) == ""
    without_specials = [text for text in texts if "<" not in text]
    assert difference(engine, tokenizer, without_specials) == ""
    ids, counts = engine.encode_flat(texts)
    assert counts.sum() == len(ids)
    library_ids, library_counts = tokenizer.encode_flat(texts)
    assert np.array_equal(ids, library_ids)
    assert np.array_equal(counts, library_counts)
    assert [len(part) for part in engine.encode_flat([])] == [0, 0]


class WrongEngine(GigatokenEngine):
    """Gives one other id, for texts that hold an x."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode_unchecked(self, texts):
        ids, counts = self._tokenizer.encode_flat(texts)
        if any("x" in text for text in texts):
            ids[-1] += 1
        return ids, counts


def test_an_engine_with_other_ids_is_not_used_and_the_reason_is_told(bpe_folder, monkeypatch):
    tokenizer = make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(bpe_folder))
    monkeypatch.setattr(gigatoken_backend, "_load_gigatoken", WrongEngine)
    engine, reason = make_engine(tokenizer, TokenizerBackend.auto)
    assert engine is tokenizer
    assert "gigatoken gives other ids than GPT2BPETokenizer from token" in reason
    with pytest.raises(ConfigError, match="other ids") as caught:
        make_engine(tokenizer, TokenizerBackend.gigatoken)
    assert "--tokenizer-backend library" in str(caught.value)


class Panic(BaseException):
    """What a panic of Rust code becomes: no Exception."""


def test_a_panic_while_loading_falls_back(bpe_folder, monkeypatch):
    tokenizer = make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(bpe_folder))

    def panic(tokenizer):
        raise Panic("index out of bounds")

    monkeypatch.setattr(gigatoken_backend, "_load_gigatoken", panic)
    engine, reason = make_engine(tokenizer, TokenizerBackend.auto)
    assert engine is tokenizer
    assert reason.endswith("gigatoken refuses this tokenizer: index out of bounds")


def test_without_gigatoken_the_library_works_and_the_extra_is_named(bpe_folder, monkeypatch):
    tokenizer = make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(bpe_folder))
    monkeypatch.setattr(gigatoken_backend, "has", lambda name: False)
    engine, reason = make_engine(tokenizer, TokenizerBackend.auto)
    assert engine is tokenizer
    assert "pip install 'megatron-lattice[fast]'" in reason


def test_a_difference_that_the_probes_missed_stops_the_run(bpe_folder):
    tokenizer = make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(bpe_folder))
    engine = WrongEngine(tokenizer)
    engine.encode_flat(["no letter of that kind"])
    with pytest.raises(DataError, match="gives other ids") as caught:
        engine.encode_flat(["an x"])
    assert "--tokenizer-backend library --restart" in str(caught.value)
