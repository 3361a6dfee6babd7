"""From JSON lines to token files: the same bytes with any number of workers, and every bad line."""

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing import documents
from megatron.core.datasets.preprocessing.documents import documents_of
from megatron.core.datasets.preprocessing.encoder import Encoder, check_ids
from megatron.core.datasets.preprocessing.inputs import expand_inputs
from megatron.core.datasets.preprocessing.job import encode_in_order
from megatron.core.datasets.preprocessing.transforms import SentenceSplitter
from megatron.core.datasets.preprocessing.units import read_units
from megatron.core.foundation.errors import DataError
from megatron.core.tokenizers import make_tokenizer
from tools import merge_datasets, preprocess_data

ROOT = Path(__file__).parents[3]
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "0"]


def write_lines(path, documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def run(tmp_path, *flags, source="in.jsonl", tokenizer=BYTES):
    arguments = ["--input", str(tmp_path / source), "--output-prefix", str(tmp_path / "out")]
    return preprocess_data.main([*arguments, *tokenizer, *flags])


def outputs(tmp_path):
    return sorted(name for name in os.listdir(tmp_path) if name.startswith("out"))


def texts_of(prefix):
    return [
        bytes(sequence.astype(np.uint8)).decode() for sequence in IndexedDataset(str(prefix))[:]
    ]


def test_each_document_is_one_sequence_that_ends_with_the_end_token(tmp_path, capsys):
    documents = [{"text": "To be"}, {"text": "or not", "n": 1}, {"text": "tö"}]
    write_lines(tmp_path / "in.jsonl", documents)
    assert run(tmp_path, "--append-eod") == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    expected = [[*document["text"].encode(), 256] for document in documents]
    assert [sequence.tolist() for sequence in dataset[:]] == expected
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert dataset.dtype == np.uint16
    assert outputs(tmp_path) == [
        "out.preprocessed.json",
        "out_text_document.bin",
        "out_text_document.idx",
    ]
    printed = capsys.readouterr().out
    for line in ("documents                      3", "tokens                        17  (uint16)"):
        assert line in printed
    assert "bytes per token            0.824" in printed


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path):
    """Real BPE, many batches, two processes against one."""
    tokenizers = pytest.importorskip("tokenizers")
    text = (ROOT / "tests/fixtures/text/sonnets.txt").read_text()
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [text], vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False
    )
    bpe.save_model(str(tmp_path))
    lines = [line for line in text.splitlines() if line]
    documents = [{"text": line * (1 + i % 3), "b": line[::-1]} for i, line in enumerate(lines)]
    write_lines(tmp_path / "in.jsonl", documents * 12)
    for workers in (0, 2):
        command = [
            sys.executable, str(ROOT / "tools/preprocess_data.py"),
            "--input", str(tmp_path / "in.jsonl"), "--json-keys", "text", "b",
            "--output-prefix", str(tmp_path / f"out{workers}"), "--append-eod",
            "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(tmp_path / "vocab.json"),
            "--merge-file", str(tmp_path / "merges.txt"), "--workers", str(workers),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
    files = expand_inputs([str(tmp_path / "in.jsonl")])
    assert len(list(read_units(files, keys=["text"]))) >= 4
    for name in ("text_document.bin", "text_document.idx", "b_document.bin", "b_document.idx"):
        one, two = tmp_path / f"out0_{name}", tmp_path / f"out2_{name}"
        assert one.read_bytes() == two.read_bytes()
        assert one.stat().st_size > 0
    tokenizer = make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(tmp_path))
    dataset = IndexedDataset(str(tmp_path / "out0_text_document"))
    ends = [sequence[-1] == tokenizer.eod for sequence in dataset[:]]
    assert len(ends) == 12 * len(lines)
    assert all(ends)
    assert tokenizer.detokenize(dataset[7][:-1].tolist()) == documents[7]["text"]


def test_compressed_files_folders_and_patterns_are_read_in_order(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    for number, opener in enumerate([open, gzip.open, bz2.open, lzma.open]):
        suffix = ["", ".gz", ".bz2", ".xz"][number]
        with opener(folder / f"{number}.jsonl{suffix}", "wb") as file:
            file.write(json.dumps({"text": f"part {number}"}).encode() + b"\n")
    (folder / "notes.txt").write_text("not data")
    assert run(tmp_path, source="parts") == 0
    assert texts_of(tmp_path / "out_text_document") == [f"part {i}" for i in range(4)]
    assert run(tmp_path, source="parts/*.jsonl*") == 0
    assert texts_of(tmp_path / "out_text_document") == [f"part {i}" for i in range(4)]


# What a line holds, the reason it is left out, and what the message says beside it.
BAD_LINES = [
    (b'{"text": "a"', "not JSON", "Expecting ',' delimiter at column 13"),
    (b"NaN", "not an object", "found float"),
    (b"[1, 2]", "not an object", "found list"),
    (b"\xff\xfe{}", "not UTF-8", "byte 1"),
    (b'{"text": "caf\xe9"}', "not UTF-8", "byte 14"),
    (b'{"title": "a"}', "no key 'text'", "keys are ['title']"),
    (b'{"text": 7}', "'text' is not text", "found int"),
    (b'{"text": null}', "'text' is not text", "found NoneType"),
    (b'{"text": ["a", 1]}', "'text' is not text", "found list"),
    (b'{"text": "\\ud83d"}', "not Unicode", "half of a surrogate pair at character 1"),
    (b"[" * 100_000, "not JSON", ""),
    (b'{"text": ' + b"9" * 5000 + b"}", "'text' is not text", "found float"),
    (b'{"text": "a\x00"}', "not JSON", "Invalid control character"),
    (b'{"text": "a", "text": "b"}', "duplicate key 'text'", ""),
    (b'{"text": NaN}', "'text' is not text", "found float"),
]


@pytest.mark.parametrize(("line", "reason", "detail"), BAD_LINES)
def test_a_bad_line_stops_with_file_and_number_and_leaves_nothing(
    tmp_path, capsys, line, reason, detail
):
    good = b'{"text": "good"}\n'
    (tmp_path / "in.jsonl").write_bytes(good * 3 + b"\n" + line + b"\n" + good)
    assert run(tmp_path) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/in.jsonl, line 5: {reason}" in error
    assert detail in error
    assert "--skip-bad-lines" in error
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("name", ["orjson", "the standard library"])
def test_the_short_way_through_a_line_finds_what_the_long_one_finds(tmp_path, monkeypatch, name):
    odd = [
        b'{"text": "a"} ', b' {"text": "b"}', b'{"text": "\\ud83d\\ude00 \xc3\xa4"}',
        b'{"n": {"text": "in"}, "text": "out"}', b'{"text": "a"}{"text": "b"}', b'"text"', b"{}",
        b'{"title": "t", "text": ["a", "b"], "n": NaN}', b'{"text": []}',
        b'{"n": ' + b"9" * 5000 + b', "text": "c"}', b'{"n": 1e999, "text": "d"}',
    ]  # fmt: skip
    bad = [line for line, _, _ in BAD_LINES]
    usual = b'{"text": "as most", "n": [1.5, null]}'
    monkeypatch.setattr(documents, "has", lambda library: library == name)
    documents._quick_parser.cache_clear()
    taken = 0
    for number, lines in enumerate([[usual], [], *([usual, line] for line in [*odd, *bad])]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        for unit in read_units(expand_inputs([str(path)]), keys=["text"]):
            short = documents_of(unit, ["text"])
            with monkeypatch.context() as patch:
                patch.setattr(documents, "_usual_documents", lambda *_: None)
                assert documents_of(unit, ["text"]) == short, lines
            taken += len(short.texts)
    documents._quick_parser.cache_clear()
    assert taken == 1 + len(odd) + len(bad) + 8


def test_bad_lines_can_be_left_out_and_are_counted_by_reason(tmp_path, capsys):
    lines = [b'{"text": "first"}', *[line for line, _, _ in BAD_LINES], b'{"text": "last"}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    assert run(tmp_path, "--skip-bad-lines") == 0
    assert texts_of(tmp_path / "out_text_document") == ["first", "last"]
    printed = capsys.readouterr().out
    for reason, count in [("not JSON", 3), ("not UTF-8", 2), ("not Unicode", 1)]:
        assert f"skipped lines, {reason}: {count} of 17" in printed


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("unit_bytes", [64, 1 << 20])
def test_an_overlong_line_is_left_behind_without_being_held(tmp_path, suffix, unit_bytes):
    path = tmp_path / f"in.jsonl{suffix}"
    with (gzip.open if suffix else open)(path, "wb") as file:
        file.write(b'{"text": "a"}\n{"text": "' + b"x" * 5000 + b'"}\n{"text": "b"}\n')
    limits = {"longest_line_bytes": 1000}
    units = read_units(expand_inputs([str(path)]), keys=["text"], unit_bytes=unit_bytes, **limits)
    found = [documents_of(unit, ["text"], **limits) for unit in units]
    assert [text for part in found for text in part.texts] == [{"text": ["a"]}, {"text": ["b"]}]
    assert [bad.reason for part in found for bad in part.bad] == ["too long"]
    assert sum(part.num_lines for part in found) == 3


def test_a_text_that_the_tokenizer_does_not_take_is_located(tmp_path, capsys):
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50", "--workers", "0"]
    write_lines(tmp_path / "in.jsonl", [{"text": "1 2"}, {"text": "3 51"}, {"text": "4"}])
    assert run(tmp_path, tokenizer=numbers) == 1
    error = capsys.readouterr().err
    assert "in.jsonl, line 2: not tokenizable" in error
    assert "id 51 is outside the vocabulary of 50" in error
    assert run(tmp_path, "--skip-bad-lines", tokenizer=numbers) == 0
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert [sequence.tolist() for sequence in dataset[:]] == [[1, 2], [4]]


@pytest.mark.parametrize("ids", [np.array([3, 10], np.uint32), np.array([3, -1], np.int32)])
def test_ids_outside_the_vocabulary_are_never_written(ids):
    with pytest.raises(DataError, match=f"gave id {ids[1]}, outside its vocabulary of 10"):
        check_ids(ids, 10)


@pytest.mark.parametrize("workers", [0, 2])
def test_corpora_of_several_keys_hold_the_same_documents(tmp_path, capsys, workers):
    pairs = [("one", "A"), ("", "B"), ("three", ""), ("four", "D"), ("", ""), (["", "six"], "F"),
             ([], "G"), (["", ""], "H")] * 50  # fmt: skip
    lines = [json.dumps({"text": text, "title": title}) for text, title in pairs]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    assert run(tmp_path, "--json-keys", "text", "title", "--workers", str(workers)) == 0
    kept = [("one", "A"), ("four", "D"), ("six", "F")] * 50
    for key, expected in zip(("text", "title"), zip(*kept, strict=True), strict=True):
        assert texts_of(tmp_path / f"out_{key}_document") == list(expected)
    assert capsys.readouterr().out.count("empty, left out              250") == 2


def test_a_missing_input_or_end_token_is_named_before_any_work(tmp_path, capsys):
    assert run(tmp_path, source="none.jsonl") == 1
    assert f"{tmp_path}/none.jsonl: no such file, and no file matches it" in capsys.readouterr().err
    write_lines(tmp_path / "in.jsonl", [{"text": "x"}])
    assert run(tmp_path, tokenizer=["--tokenizer-type", "ByteTokenizer", "--workers", "-1"]) == 2
    assert "--workers -1" in capsys.readouterr().err


def test_an_output_that_cannot_be_made_is_named(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", [{"text": "x"}])
    assert run(tmp_path, "--output-prefix", str(tmp_path / ("n" * 300))) == 1
    assert "nnn.lock: File name too long" in capsys.readouterr().err


def test_the_number_of_workers_can_be_measured(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", [{"text": "x y"}] * 50)
    assert run(tmp_path, "--find-optimal-num-workers", "--workers-to-check", "0") == 0
    said = capsys.readouterr().out
    assert "tokens/s" in said
    assert said.endswith("most tokens/s: --workers 0\n")
    assert outputs(tmp_path) == []


class KillerTokenizer:
    """Dies like a process that ran out of memory."""

    vocab_size = 10

    def encode_flat(self, texts):
        if "die" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.ones(len(texts), np.int32), np.ones(len(texts), np.int64)


def work_until_a_worker_dies(path):
    """Run in a process of its own: encode with two workers, print the error."""
    encoder = Encoder(engine=KillerTokenizer(), keys=["text"], dtype=np.uint8, vocab_size=10)
    try:
        units = read_units(expand_inputs([path]), keys=["text"])
        list(encode_in_order(units, encoder, 2))
    except DataError as error:
        print(error)


def test_a_killed_worker_stops_the_tool_instead_of_hanging_it(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "fine"}] * 3000 + [{"text": "die"}])
    code = f"from {__name__} import work_until_a_worker_dies as f; f({path!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "a worker process died" in done.stdout
    assert f"of {path}" in done.stdout
    assert "fewer --workers" in done.stdout


def test_the_tool_starts_without_torch_or_the_model(tmp_path):
    code = (
        "import sys; sys.argv = ['x']; from tools import preprocess_data; "
        "print([n for n in ('torch', 'transformers', 'tokenizers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# --- sentences ----------------------------------------------------------------------------------


class FakePunkt(types.ModuleType):
    """Cuts after full stops, with the interface of NLTK's model."""

    class PunktTokenizer:
        def __init__(self, language):
            if language != "english":
                raise LookupError(language)

        def span_tokenize(self, text):
            start = 0
            for end in [i + 1 for i, c in enumerate(text) if c == "."]:
                yield start, end
                start = end + 1


@pytest.fixture
def punkt(monkeypatch):
    for name in ("nltk", "nltk.tokenize"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", FakePunkt("nltk.tokenize.punkt"))


def test_sentences_become_sequences_of_their_document(tmp_path, punkt, capsys):
    write_lines(tmp_path / "in.jsonl", [{"text": "One. Two."}, {"text": "Three."}])
    assert run(tmp_path, "--split-sentences") == 0
    assert texts_of(tmp_path / "out_text_sentence") == ["One.", "Two.", "Three."]
    dataset = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert "sequences                      3" in capsys.readouterr().out


def test_white_space_between_sentences_can_be_kept(punkt):
    assert SentenceSplitter("english")("One.\nTwo.") == ["One.", "Two."]
    assert SentenceSplitter("english", keep_newlines=True)("One.\nTwo.") == ["One.\n", "Two."]


def test_a_missing_sentence_model_is_named(tmp_path, punkt, capsys):
    write_lines(tmp_path / "in.jsonl", [{"text": "One. Two."}])
    assert run(tmp_path, "--split-sentences", "--lang", "klingon") == 1
    assert "python -m nltk.downloader punkt_tab" in capsys.readouterr().err


# --- merging ------------------------------------------------------------------------------------


def test_merging_nothing_or_a_damaged_shard_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    flags = ["--output-prefix", str(tmp_path / "out")]
    assert merge_datasets.main(["--input", str(tmp_path / "empty"), *flags]) == 1
    assert "holds no corpus" in capsys.readouterr().err
    write_lines(tmp_path / "in.jsonl", [{"text": "x"}])
    run(tmp_path)
    os.truncate(tmp_path / "out_text_document.idx", 40)
    shard = str(tmp_path / "out_text_document")
    assert merge_datasets.main(["--input", shard, *flags]) == 1
    assert "(truncated file)" in capsys.readouterr().err
    assert not (tmp_path / "out.bin").exists()
