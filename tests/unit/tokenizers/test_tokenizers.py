"""Every tokenizer type: ids, round trips, special tokens, and files that are refused."""

import argparse
import json
import os
import pickle
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.foundation.errors import ConfigError, DataError, UntokenizableTextError
from megatron.core.tokenizers import (
    TOKENIZER_TYPES,
    MegatronTokenizer,
    make_tokenizer,
    pad_vocab_size,
)
from megatron.core.tokenizers.null_and_byte import ByteTokenizer
from megatron.core.tokenizers.tik_token import DEFAULT_SPECIAL_TOKENS
from megatron.core.tokenizers.utils.build_tokenizer import (
    build_tokenizer,
    vocab_size_with_padding,
)
from tests.parity.encoder_case import write_vocabulary

HARD_TEXTS = [
    "",
    " ",
    "Plain words.",
    "line\n\nbreaks\t tabs   and  spaces ",
    "Zwölf Boxkämpfer — 你好,世界 🙂👩‍👩‍👧",
    "<|endoftext|> </s> <EOD>",
    "\u0000\u0007",
]


@pytest.fixture
def make(bpe_folder, piece_model, rank_list, rank_file, tmp_path):
    def word_piece(kind):
        return make_tokenizer(kind, vocab_file=str(write_vocabulary(tmp_path / "pieces")))

    def one(kind):
        return {
            "BertWordPieceLowerCase": lambda: word_piece(kind),
            "BertWordPieceCase": lambda: word_piece(kind),
            "GPT2BPETokenizer": lambda: make_tokenizer(
                kind,
                vocab_file=str(bpe_folder / "vocab.json"),
                merge_file=str(bpe_folder / "merges.txt"),
            ),
            "HuggingFaceTokenizer": lambda: make_tokenizer(kind, tokenizer_model=str(bpe_folder)),
            "TikTokenizer": lambda: make_tokenizer(
                kind, tokenizer_model=rank_list, tiktoken_pattern="v2"
            ),
            "rank file": lambda: make_tokenizer(
                "TikTokenizer", tokenizer_model=rank_file, tiktoken_pattern="gpt2"
            ),
            "NullTokenizer": lambda: make_tokenizer(kind, vocab_size=100),
            "ByteTokenizer": lambda: make_tokenizer(kind),
        }.get(kind, lambda: make_tokenizer(kind, tokenizer_model=piece_model))()

    return one


LOSSY = ("NullTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
TEXT_TYPES = [kind for kind in (*TOKENIZER_TYPES, "rank file") if kind not in LOSSY]


@pytest.mark.parametrize("kind", TEXT_TYPES)
def test_text_comes_back_and_batches_equal_single_texts(make, sonnets, kind):
    tokenizer = make(kind)
    texts = [*HARD_TEXTS, sonnets[:5000]]
    if "SentencePiece" in kind or kind == "Llama2Tokenizer":
        texts = [text for text in texts if "\u0000" not in text]
    texts.append("text that spells <|endoftext|> stays text")
    flat, counts = tokenizer.encode_flat(texts)
    parts = [tokenizer.tokenize_part(text) for text in texts]
    assert flat.tolist() == [number for ids in parts for number in ids]
    assert counts.tolist() == [*map(len, parts)]
    assert tokenizer.tokenize_parts(texts) == parts
    for text in texts:
        ids = tokenizer.tokenize(text)
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
        back = tokenizer.detokenize(ids)
        assert back.removeprefix("<s>").strip(" ") == text.strip(" ")


def test_a_text_that_the_library_gives_up_on_is_an_error_like_others(make):
    # Older versions of the library panic where newer ones raise.
    with pytest.raises(UntokenizableTextError, match=r"1,000,000 characters|gave up"):
        make("TikTokenizer").tokenize(" " * 1_000_000)


def test_no_panic_leaves_a_tokenizer():
    class Panic(BaseException):
        pass

    class Fragile(ByteTokenizer):
        def tokenize(self, text):
            raise {"panic": Panic, "stop": KeyboardInterrupt, "odd": ValueError}[text]("why")

    for text, kind in (("panic", UntokenizableTextError), ("stop", KeyboardInterrupt),
                       ("odd", ValueError)):  # fmt: skip
        with pytest.raises(kind, match="why"):
            Fragile().tokenize(text)
    with pytest.raises(UntokenizableTextError):
        Fragile().tokenize_parts(["panic"])


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "HuggingFaceTokenizer"])
def test_hugging_face_ids_are_those_of_the_library(make, bpe_folder, sonnets, kind):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(bpe_folder / "tokenizer.json"))
    tokenizer = make(kind)
    assert tokenizer.vocab_size == len(reference) == 600
    assert tokenizer.tokenize(sonnets[:3000]) == reference.encode(
        sonnets[:3000], add_special_tokens=False
    )


def test_sentencepiece_ids_are_those_of_the_library(make, piece_model, sonnets):
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=piece_model)
    ids = reference.encode(sonnets[:3000])
    assert make("GPTSentencePieceTokenizer").tokenize(sonnets[:3000]) == ids
    assert make("SentencePieceTokenizer").tokenize(sonnets[:3000]) == ids
    llama = make("Llama2Tokenizer")
    assert llama.tokenize(sonnets[:3000]) == [1, *ids]
    assert llama.tokenize("a", bos=False, eos=True)[-1] == 2


def test_tiktoken_ids_are_ranks_shifted_by_the_special_tokens(make, ranks, sonnets):
    import tiktoken

    from megatron.core.tokenizers.tik_token import PATTERNS

    def reference(pattern):
        return tiktoken.Encoding(
            "x", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary(sonnets[:3000])

    shifted = make("TikTokenizer")
    assert shifted.tokenize(sonnets[:3000]) == [number + 1000 for number in reference("v2")]
    assert shifted.vocab_size == 1000 + len(ranks)
    specials = {token: shifted.vocab[token] for token in DEFAULT_SPECIAL_TOKENS}
    assert list(specials.values()) == list(range(7))
    assert (shifted.unk, shifted.bos, shifted.eod, shifted.pad) == (0, 1, 2, 4)
    plain = make("rank file")
    assert plain.tokenize(sonnets[:3000]) == reference("gpt2")
    assert plain.eod == len(ranks) == plain.vocab_size - 1


def test_a_rank_list_is_cut_to_the_vocabulary_that_was_asked_for(rank_list):
    tokenizer = make_tokenizer(
        "TikTokenizer",
        tokenizer_model=rank_list,
        tiktoken_pattern="v1",
        vocab_size=300,
        tiktoken_num_special_tokens=10,
        tiktoken_special_tokens=["<unk>", "<s>", "</s>"],
    )
    assert tokenizer.vocab_size == 300
    assert max(tokenizer.tokenize("Shall I compare thee to a summer's day?")) < 300


def test_a_tekken_file_brings_its_own_settings(rank_list, tmp_path):
    config = {
        "pattern": r"\p{L}+|[^\p{L}]",
        "default_vocab_size": 400,
        "default_num_special_tokens": 20,
    }
    with open(rank_list) as file:
        content = json.dumps({"config": config, "vocab": json.load(file)})
    (tmp_path / "tekken.json").write_text(content)
    tokenizer = MegatronTokenizer.from_pretrained(str(tmp_path / "tekken.json"))
    assert tokenizer.vocab_size == 400
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (0, 1, 2, None)
    assert tokenizer.tokenize("a") == [20 + ord("a")]


def test_sentencepiece_special_tokens_follow_the_pieces_in_order(make, piece_model):
    tokenizer = make_tokenizer(
        "SentencePieceTokenizer", tokenizer_model=piece_model, vocab_extra_ids=3
    )
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (600, 601, 602, 603)
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (604, 1, 2)
    assert tokenizer.vocab["<extra_id_2>"] == 607
    assert tokenizer.vocab_size == 608
    assert tokenizer.detokenize([*tokenizer.tokenize("Hail!"), tokenizer.eod]) == "Hail!"
    gpt = make("GPTSentencePieceTokenizer")
    assert (gpt.eod, gpt.vocab_size) == (2, 600)
    assert gpt.pad is None, "never the library's -1"


def test_the_null_tokenizer_reads_numbers_and_ends_documents_with_the_last():
    tokenizer = make_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize("1 2  99") == [1, 2, 99]
    assert tokenizer.detokenize([1, 2]) == "1 2"
    assert (tokenizer.eod, tokenizer.vocab_size) == (99, 100)
    for text in ("100", "-1", "x"):
        with pytest.raises(ValueError):
            tokenizer.tokenize(text)


@pytest.mark.parametrize("kind", [*TOKENIZER_TYPES, "rank file"])
def test_a_tokenizer_survives_pickling_and_describes_itself(make, kind):
    tokenizer = make(kind)
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = "7 11" if kind == "NullTokenizer" else "What bloody man is that?"
    assert copy.tokenize(text) == tokenizer.tokenize(text)
    assert copy.unique_description == tokenizer.unique_description
    assert next(iter(tokenizer.unique_identifiers)) == "class"
    assert json.loads(tokenizer.unique_description)["class"] == type(tokenizer).__name__
    some = tokenizer.tokenize(text)[0]
    assert tokenizer.vocab[tokenizer.inv_vocab[some]] == some


def test_a_moved_tokenizer_is_the_same_and_an_edited_one_is_not(bpe_folder, tmp_path):
    moved = shutil.copytree(bpe_folder, tmp_path / "moved")
    one = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(bpe_folder))
    two = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(moved / "tokenizer.json"))
    assert one.unique_description == two.unique_description
    content = json.loads((moved / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (moved / "tokenizer.json").write_text(json.dumps(content))
    three = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(moved))
    assert three.unique_description != one.unique_description


def test_a_saved_length_limit_does_not_cut_documents(bpe_folder, tmp_path, sonnets):
    folder = shutil.copytree(bpe_folder, tmp_path / "limited")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {
        "max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    assert len(tokenizer.tokenize(sonnets[:3000])) > 500
    assert len(tokenizer.tokenize_parts([sonnets[:3000]])[0]) > 500


def test_holes_in_the_ids_count_for_the_vocabulary(bpe_folder, tmp_path):
    folder = shutil.copytree(bpe_folder, tmp_path / "holes")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzzz"] = 700
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    assert tokenizer.vocab_size == 701


def test_the_end_token_is_guessed_for_a_lone_file_and_missing_where_there_is_none(
    bpe_folder, tmp_path
):
    shutil.copy(bpe_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    lone = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json"))
    assert lone.eod == lone.vocab["<|endoftext|>"]
    text = (tmp_path / "tokenizer.json").read_text().replace("<|endoftext|>", "<|unusual|>")
    (tmp_path / "tokenizer.json").write_text(text)
    lone = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert lone.eod is None
    with pytest.raises(DataError, match="has no eod token, which --append-eod needs"):
        lone.special_id("eod", purpose="--append-eod")


def test_a_folder_without_tokenizer_json_goes_through_transformers(bpe_folder, tmp_path, sonnets):
    folder = shutil.copytree(bpe_folder, tmp_path / "slow")
    os.remove(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    direct = make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(folder))
    assert tokenizer.tokenize(sonnets[:2000]) == direct.tokenize(sonnets[:2000])
    assert tokenizer.eod == direct.eod


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "tokenization.py").write_text(f"open({str(canary)!r}, 'w')")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization.Mine", None]}})
    )
    with pytest.raises(ConfigError) as caught:
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert "wants to run its own Python code (auto_map)" in str(caught.value)
    assert "--trust-remote-code" in str(caught.value)
    assert not canary.exists()


# --- refusals -----------------------------------------------------------------------------------


def refusal(kind, error=DataError, **settings):
    with pytest.raises(error) as caught:
        make_tokenizer(kind, **settings)
    return str(caught.value)


def test_an_almost_empty_tokenizer_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"<|endoftext|>": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    message = refusal("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert "has a vocabulary of 1 entries" in message
    assert "a text tokenizer has at least 32 entries" in message


def test_files_that_do_not_belong_together_are_refused(bpe_folder, tmp_path):
    vocab, merges = str(bpe_folder / "vocab.json"), str(bpe_folder / "merges.txt")
    other = tmp_path / "merges.txt"
    other.write_text("#version: 0.2\nqq zz\n")
    message = refusal("GPT2BPETokenizer", vocab_file=vocab, merge_file=str(other))
    assert f"{other} does not fit {vocab}" in message
    holes = tmp_path / "vocab.json"
    holes.write_text(json.dumps({"a": 0, "b": 2}))
    message = refusal("GPT2BPETokenizer", vocab_file=str(holes), merge_file=merges)
    assert "does not give every id from 0 once" in message
    holes.write_text("{")
    message = refusal("GPT2BPETokenizer", vocab_file=str(holes), merge_file=merges)
    assert f"{holes} is not valid JSON" in message


def test_missing_files_and_flags_are_named(tmp_path):
    assert "--vocab-file" in refusal("GPT2BPETokenizer", ConfigError)
    missing = str(tmp_path / "none.json")
    message = refusal("GPT2BPETokenizer", vocab_file=missing, merge_file=missing)
    assert f"{missing}: no such file" in message
    assert "--tokenizer-model names its file" in refusal("Llama2Tokenizer", ConfigError)
    assert "--vocab-size 32000" in refusal("NullTokenizer", ConfigError)
    message = refusal("SentencePieceTokenizer", tokenizer_model=missing)
    assert "where a SentencePiece model was expected" in message
    message = refusal("TikTokenizer", tokenizer_model="no_such_set")
    assert "neither a file nor a name of a tiktoken encoding" in message


def test_garbage_files_are_refused(tmp_path, rank_file, bpe_folder):
    garbage = tmp_path / "garbage.model"
    garbage.write_bytes(b"\x00\x01garbage" * 50)
    message = refusal("SentencePieceTokenizer", tokenizer_model=str(garbage))
    assert "is not a SentencePiece model" in message
    message = refusal("HuggingFaceTokenizer", tokenizer_model=str(garbage))
    assert "cannot be read as a tokenizer" in message
    ranks = tmp_path / "mine.tiktoken"
    with open(rank_file, "rb") as file:
        ranks.write_bytes(file.read() + b"not-a-rank\n")
    message = refusal("TikTokenizer", tokenizer_model=str(ranks), tiktoken_pattern="v1")
    assert f"{ranks}, line " in message
    assert "not a base64 token and its rank" in message
    ranks.write_bytes(b"QQ== 0\n")
    message = refusal("TikTokenizer", tokenizer_model=str(ranks), tiktoken_pattern="v1")
    assert "lacks 255 of the 256 single bytes, byte 0 first" in message
    message = refusal("TikTokenizer", tokenizer_model=str(bpe_folder / "tokenizer.json"))
    assert "for a tokenizer.json use --tokenizer-type HuggingFaceTokenizer" in message
    message = refusal("TikTokenizer", ConfigError, tokenizer_model=rank_file)
    assert "does not contain the pattern that cuts text" in message


def test_unknown_and_unsupported_types_say_what_there_is():
    message = refusal("MultimodalTokenizer", ConfigError)
    assert "is not supported" in message
    assert "nearest is HuggingFaceTokenizer" in message
    assert "ByteTokenizer" in refusal("GPT3Tokenizer", ConfigError)


def test_word_piece_gives_the_ids_of_transformers_tokenizer(tmp_path):
    import transformers

    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "the", "The",
              "caf", "##e", "##é", "!", "zq", *"abcdefghijklmnopqrstuvwxyz"]  # fmt: skip
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    text = "The unaffable café! zq"
    for name, lower in (("BertWordPieceLowerCase", True), ("BertWordPieceCase", False)):
        ours = make_tokenizer(name, vocab_file=str(tmp_path / "vocab.txt"), vocab_extra_ids=3)
        vocab = {token: number for number, token in enumerate(tokens)}
        theirs = transformers.BertTokenizer(vocab=vocab, do_lower_case=lower)
        assert ours.tokenize(text) == theirs.encode(text, add_special_tokens=False)
        assert (ours.cls, ours.sep, ours.pad, ours.mask) == (2, 3, 0, 4)
        size = len(tokens)
        assert (ours.bos, ours.eos, ours.vocab_size) == (size, size + 1, size + 5)
        assert ours.additional_special_tokens_ids == [size + 2, size + 3, size + 4]
    (tmp_path / "vocab.txt").write_text("\n".join([*tokens, "the"]) + "\n")
    assert "holds a token twice" in refusal(
        "BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt")
    )


# --- doors --------------------------------------------------------------------------------------


def test_files_say_which_library_reads_them(bpe_folder, piece_model, rank_list, rank_file):
    def kind(path, **settings):
        return type(MegatronTokenizer.from_pretrained(path, **settings)).__name__

    assert kind(str(bpe_folder)) == "HuggingFaceTokenizer"
    assert kind(str(bpe_folder / "tokenizer.json")) == "HuggingFaceTokenizer"
    assert kind(piece_model) == "GPTSentencePieceTokenizer"
    assert kind(rank_list, tiktoken_pattern="v1") == "TikTokenizer"
    assert kind(rank_file, tiktoken_pattern="v1") == "TikTokenizer"
    assert kind(None, metadata_path={"library": "null"}, vocab_size=9) == "NullTokenizer"
    assert kind(None, metadata_path={"library": "byte-level"}) == "ByteTokenizer"
    with pytest.raises(ConfigError, match="tokenizer library 'nemo' is unknown"):
        kind(None, metadata_path={"library": "nemo"})


def test_settings_by_the_names_of_megatron_are_taken_and_others_say_what_to_do(rank_list):
    tokenizer = MegatronTokenizer.from_pretrained(
        rank_list, pattern="v1", num_special_tokens=10, chat_template=None, special_tokens=[]
    )
    assert tokenizer.vocab_size == make_tokenizer(
        "TikTokenizer", tokenizer_model=rank_list, tiktoken_pattern="v1",
        tiktoken_num_special_tokens=10,
    ).vocab_size  # fmt: skip
    with pytest.raises(ConfigError, match="next to the tokenizer as chat_template.jinja"):
        MegatronTokenizer.from_pretrained(rank_list, chat_template="{{ messages }}")
    with pytest.raises(ConfigError, match="leave use_fast out"):
        MegatronTokenizer.from_pretrained(rank_list, use_fast=True)


def test_metadata_beside_a_tokenizer_decides(bpe_folder, tmp_path):
    folder = str(shutil.copytree(bpe_folder, tmp_path / "t"))
    MegatronTokenizer.write_metadata(folder, "megatron")
    assert type(MegatronTokenizer.from_pretrained(folder)).__name__ == "GPT2BPETokenizer"
    with pytest.raises(ConfigError, match="exists"):
        MegatronTokenizer.write_metadata(folder, "huggingface")
    MegatronTokenizer.write_metadata(folder, "huggingface", overwrite=True)
    assert type(MegatronTokenizer.from_pretrained(folder)).__name__ == "HuggingFaceTokenizer"


def test_arguments_of_a_script_make_a_tokenizer_and_stay_as_they_were(piece_model):
    args = argparse.Namespace(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=piece_model,
        vocab_extra_ids=2,
        vocab_file=None,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
        rank=0,
    )
    before = dict(vars(args))
    tokenizer = build_tokenizer(args)
    assert tokenizer.vocab_size == 607
    assert vocab_size_with_padding(tokenizer.vocab_size, args, logging_enabled=False) == 768
    assert vars(args) == before
    with pytest.raises(ConfigError, match="no tokenizer is named"):
        build_tokenizer(argparse.Namespace())


@given(size=st.integers(1, 10**6), multiple=st.integers(1, 512), ranks=st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_padded_vocabularies_split_evenly_and_waste_less_than_one_step(size, multiple, ranks):
    padded = pad_vocab_size(size, divisible_by=multiple, tensor_parallel_size=ranks)
    assert padded % (multiple * ranks) == 0
    assert 0 <= padded - size < multiple * ranks
