"""Tokenizers trained on the test text, once for all tests."""

import base64
import json
from pathlib import Path

import pytest

TEXT = Path(__file__).parents[2] / "fixtures" / "text"


@pytest.fixture(scope="session")
def sonnets():
    return (TEXT / "sonnets.txt").read_text()


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    """A byte-level BPE: vocab.json, merges.txt and tokenizer.json with an end token."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(
        [str(TEXT / "macbeth.txt")],
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    bpe.save_model(str(folder))
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}})
    )
    return folder


@pytest.fixture(scope="session")
def piece_model(tmp_path_factory):
    """A SentencePiece model like Llama's: bos 1, eos 2, unk 0, no pad."""
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("piece") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        input=str(TEXT / "macbeth.txt"),
        model_prefix=str(path),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return f"{path}.model"


@pytest.fixture(scope="session")
def ranks(bpe_folder):
    """Byte-pair ranks as tiktoken counts them, from the trained merges: single bytes first."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    visible = [b for b in range(256) if chr(b) in alphabet]
    hidden = [b for b in range(256) if b not in visible]
    to_byte = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    ranks = {bytes([b]): b for b in range(256)}
    for line in (bpe_folder / "merges.txt").read_text().splitlines()[1:]:
        token = bytes(to_byte[c] for c in line.replace(" ", ""))
        ranks.setdefault(token, len(ranks))
    return ranks


@pytest.fixture(scope="session")
def rank_list(ranks, tmp_path_factory):
    """The ranks as a JSON list."""
    path = tmp_path_factory.mktemp("ranks") / "vocab.json"
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    path.write_text(json.dumps(entries))
    return str(path)


@pytest.fixture(scope="session")
def rank_file(ranks, tmp_path_factory):
    """The ranks as a .tiktoken file."""
    path = tmp_path_factory.mktemp("ranks") / "mine.tiktoken"
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)
