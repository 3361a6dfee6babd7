"""A tokenizer of any type is written so that `AutoTokenizer` gives its ids and special ids."""

import json
import shutil

import pytest

from megatron.core.tokenizers import make_tokenizer
from megatron.core.tokenizers.gigatoken_backend import PROBES
from megatron.hugging_face.tokenizer_files import special_ids, write_tokenizer
from tests.parity.encoder_case import write_vocabulary


@pytest.fixture(scope="module")
def unigram_model(tmp_path_factory, sonnets):
    """A SentencePiece model with the library's own settings: Unicode is normalized."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("unigram")
    (folder / "text").write_text(sonnets)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "model"), vocab_size=500,
        model_type="unigram", minloglevel=2, byte_fallback=True,
    )  # fmt: skip
    return str(folder / "model.model")


@pytest.fixture(params=["GPT2BPETokenizer", "HuggingFaceTokenizer", "a lone tokenizer.json",
                        "bytes", "BertWordPieceCase", "pieces", "unigram", "Llama2Tokenizer",
                        "added pieces", "rank list", "rank file"])  # fmt: skip
def tokenizer(request, bpe_folder, piece_model, unigram_model, rank_list, rank_file, tmp_path):
    kind = request.param
    readable = shutil.copytree(bpe_folder, tmp_path / "readable")
    named = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (readable / "tokenizer_config.json").write_text(json.dumps(named))
    name, settings = {
        "GPT2BPETokenizer": (kind, {"tokenizer_model": str(bpe_folder)}),
        "HuggingFaceTokenizer": (kind, {"tokenizer_model": str(readable)}),
        "a lone tokenizer.json": (
            "HuggingFaceTokenizer", {"tokenizer_model": str(bpe_folder / "tokenizer.json")},
        ),
        "bytes": ("ByteTokenizer", {}),
        "BertWordPieceCase": (kind, {"vocab_file": str(write_vocabulary(tmp_path / "pieces"))}),
        "pieces": ("GPTSentencePieceTokenizer", {"tokenizer_model": piece_model}),
        "unigram": ("GPTSentencePieceTokenizer", {"tokenizer_model": unigram_model}),
        "Llama2Tokenizer": (kind, {"tokenizer_model": piece_model}),
        "added pieces": (
            "SentencePieceTokenizer", {"tokenizer_model": piece_model, "vocab_extra_ids": 3},
        ),
        "rank list": (
            "TikTokenizer", {"tokenizer_model": rank_list, "tiktoken_pattern": "v2"},
        ),
        "rank file": (
            "TikTokenizer", {"tokenizer_model": rank_file, "tiktoken_pattern": "cl100k"},
        ),
    }[kind]  # fmt: skip
    return make_tokenizer(name, **settings)


def test_auto_tokenizer_reads_what_was_written(tokenizer, tmp_path, sonnets):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "written"
    folder.mkdir()
    note = write_tokenizer(tokenizer, folder)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*PROBES, sonnets[:5000], "and <extra_id_1>"]
    spelled = tokenizer.spelled_specials
    texts = [text for text in texts if not any(token in text for token in spelled)]
    other = [text for text in texts if auto(text).input_ids != tokenizer.tokenize(text)]
    # The library's own normalizer differs from SentencePiece's for two marks on one letter.
    assert other == ([] if note is None else [text for text in texts if "o\u0308\u0323" in text])
    assert (note is None) == (not other)
    ids = tokenizer.tokenize_part("What bloody man is that?")
    assert auto.decode(ids).strip() == tokenizer.detokenize(ids).strip()
    assert len(auto) == tokenizer.vocab_size
    assert auto.eos_token_id == (tokenizer.eod if tokenizer.eos is None else tokenizer.eos)
    for name in ("bos", "pad"):
        assert getattr(auto, f"{name}_token_id") == getattr(tokenizer, name)


def test_a_tokenizer_without_a_form_of_transformers_is_named(tmp_path):
    why = write_tokenizer(make_tokenizer("NullTokenizer", vocab_size=9), tmp_path)
    assert why == "no tokenizer is written: Transformers has no NullTokenizer"
    assert not [*tmp_path.iterdir()]


def test_a_converted_tokenizer_with_other_ids_is_not_written(tmp_path, monkeypatch):
    tokenizer = make_tokenizer("ByteTokenizer")
    monkeypatch.setattr(tokenizer, "tokenize", lambda text: [7])
    assert "no tokenizer is written, since " in write_tokenizer(tokenizer, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_run_without_special_tokens_writes_a_tokenizer_without_them(bpe_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    fast = tokenizers.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    folder = tmp_path / "begun"
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    for leaves_out in (False, True):
        tokenizer = make_tokenizer(
            "HuggingFaceTokenizer", tokenizer_model=str(folder),
            tokenizer_hf_no_include_special_tokens=leaves_out,
        )  # fmt: skip
        out = tmp_path / f"out{leaves_out}"
        out.mkdir()
        assert write_tokenizer(tokenizer, out) is None
        auto = transformers.AutoTokenizer.from_pretrained(out)
        assert auto("a b").input_ids == tokenizer.tokenize("a b")
        assert (auto("a b").input_ids[0] == 0) == (not leaves_out)


def test_special_ids_that_the_model_lacks_are_left_out():
    tokenizer = make_tokenizer("ByteTokenizer")
    assert special_ids(tokenizer, 258) == {
        "bos_token_id": None, "pad_token_id": 257, "eos_token_id": 256,
    }  # fmt: skip
    assert special_ids(tokenizer, 256) == {"bos_token_id": None, "eos_token_id": None}
