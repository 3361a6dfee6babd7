"""tools/inspect_dataset.py and tools/build_index.py: what they find, and what they say."""

import json
import os
import sys

import numpy as np
import pytest

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.corpus import inspection
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list
from megatron.training.datasets.iterators import describe_blend
from tests.harness.pool import REPOSITORY
from tests.unit.datasets.corpora import EOD, config, random_documents, write_corpus

sys.path.append(str(REPOSITORY / "tools"))
import build_index
import inspect_dataset


def run(capsys, *words):
    status = inspect_dataset.main([str(word) for word in words])
    return status, capsys.readouterr().out


def with_sentences(prefix):
    """Write two documents of several sequences, an empty one, and one of one sequence."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_document([1, 2, 3, EOD], [3, 1])
        builder.add_document([], [])
        builder.add_document([4, 5], [1, 1])
        builder.add_document([1, 2, 3, EOD], [4])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_statistics_count_documents_not_sequences(tmp_path):
    found = inspection.statistics(IndexedDataset(with_sentences(tmp_path / "c")))
    assert (found.num_documents, found.num_sequences, found.num_tokens) == (4, 5, 10)
    assert (found.shortest, found.longest, found.mean) == (0, 4, 2.5)
    assert found.num_empty_documents == 1
    assert found.histogram == {0: 1, 2: 1, 4: 2}
    assert found.num_bytes == os.path.getsize(tmp_path / "c.bin")


def test_stats_of_a_folder_are_printed_and_are_json(tmp_path, capsys):
    for name in ("a", "b"):
        write_corpus(tmp_path / name, random_documents(3, 40))
    status, text = run(capsys, "stats", tmp_path)
    assert status == 0
    assert text.count(": 40 documents") == 2
    _, text = run(capsys, "stats", tmp_path / "a", "--json")
    assert json.loads(text)["num_documents"] == 40


def test_lengths_of_a_folder_are_drawn(tmp_path, capsys):
    write_corpus(tmp_path / "a", [[1] * 5, [], [1] * 9])
    write_corpus(tmp_path / "b", random_documents(3, 40))
    page, picture = tmp_path / "lengths.html", tmp_path / "lengths.png"
    _, plain = run(capsys, "stats", tmp_path)
    assert run(capsys, "stats", tmp_path, "--report", page) == (0, plain)
    assert all(f"{tmp_path / name}: " in page.read_text() for name in ("a", "b"))
    assert "3 documents, 14 tokens" in page.read_text()
    run(capsys, "stats", tmp_path, "--json", "--report", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(capsys, "stats", tmp_path, "--report", "lengths.pdf")[0] == 2


def test_verify_names_each_faulty_corpus_and_each_fault(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspection, "_BLOCK_TOKENS", 7)
    documents = random_documents(3, 40)
    good = write_corpus(tmp_path / "good", documents)
    assert run(capsys, "verify", good, "--vocab-size", 100, "--eod", EOD) == (0, f"{good}: ok\n")
    documents[17][0] = 500
    documents[39][-1] = 3
    bad = write_corpus(tmp_path / "bad", documents)
    (tmp_path / "cut.idx").write_bytes((tmp_path / "bad.idx").read_bytes()[:-1])
    (tmp_path / "cut.bin").write_bytes((tmp_path / "bad.bin").read_bytes())
    status, text = run(capsys, "verify", tmp_path, "--vocab-size", 100, "--eod", EOD)
    assert status == 1
    assert f"{good}: ok" in text
    assert f"{bad}: FAULTY\n  token 500 at position 0 of document 17 is outside" in text
    assert "1 documents do not end with 99" in text
    assert "cut: FAULTY" in text
    assert "truncated file" in text


def test_documents_are_shown_as_ids_and_as_text(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "c", [np.frombuffer(b"first", np.uint8), [72, 105, 33]])
    status, text = run(
        capsys, "show", f"{prefix}.idx", "--documents", 1, "--tokenizer-type", "ByteTokenizer"
    )
    assert (status, text) == (0, "document 1: 3 tokens\n  | Hi!\n")
    _, text = run(capsys, "show", prefix, "--tokens", 2)
    assert text == "document 0: 5 tokens (the first 2)\n  ids   102 105\n"
    write_corpus(tmp_path / "c_mask", [[0] * 5, [0, 1, 1]])
    _, text = run(capsys, "show", prefix, "--documents", 1, "--tokenizer-type", "ByteTokenizer")
    assert text.endswith("  | Hi!\n  of these 2 are learned:\n  | i!\n")
    words = ["--documents", 1, "--ids", "--tokenizer-type", "ByteTokenizer"]
    assert run(capsys, "show", prefix, *words)[1].startswith(
        "document 1: 3 tokens\n  | Hi!\n  ids   72 105 33\n"
    )


def test_text_is_shown_in_lines_without_what_a_terminal_would_obey(tmp_path, capsys):
    text = "one\ntwo\x1b[31m red\x07\ttab ä".encode()
    prefix = write_corpus(tmp_path / "c", [np.frombuffer(text, np.uint8)])
    _, shown = run(capsys, "show", prefix, "--tokenizer-type", "ByteTokenizer")
    assert shown.split("\n", 1)[1] == "  | one\n  | two\\x1b[31m red\\x07\ttab ä\n"


def test_the_log_and_the_audit_of_a_run_say_what_its_blend_gives(tmp_path, capsys):
    for name in "ab":
        write_corpus(tmp_path / name, [list(range(32))] * 4)
    blend = get_blend_from_list(["3", str(tmp_path / "a"), "1", str(tmp_path / "b")])
    settings = config(blend=blend, split="1", sequence_length=16)
    train = BlendedMegatronDatasetBuilder(GPTDataset, [40, 0, 0], lambda: True, settings).build()[0]
    folder = tmp_path / "audit"
    describe_blend(train, 0, str(folder))
    said = capsys.readouterr().out
    assert "40 samples of 2 corpora" in said
    assert said.split("corpus  ")[1].split()[:12] == [
        "samples", "share", "asked", "epochs", ">", "a", "30", "75.0000%", "75.0000%", "3.750",
        ">", "b",
    ]  # fmt: skip
    (folder / "dp00000.jsonl").write_text("[0, [1, 2]]\n")
    status, text = run(capsys, "audit", folder)
    assert status == 0
    assert "40 samples of 2 corpora" in text
    assert "75.0000%" in text


@pytest.mark.parametrize("order", ["megatron", "native"])
def test_a_blend_shows_samples_share_and_epochs_of_each_corpus(tmp_path, capsys, order):
    sizes = {"a": 640, "b": 64, "c": 320}
    for name, count in sizes.items():
        write_corpus(tmp_path / name, [[5] * (count // 4)] * 4)
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    words = [word for name in sizes for word in (weights[name], tmp_path / name)]
    asked = ["--samples", 50, "--seq-length", 16, "--sample-order", order]
    status, text = run(capsys, "blend", *words, *asked, "--json")
    assert status == 0
    rows = {os.path.basename(row["path"]): row for row in map(json.loads, text.splitlines())}
    blend = get_blend_from_list([str(word) for word in words])
    settings = config(blend=blend, split="1", sequence_length=16, sample_order=order,
                      path_to_cache=str(tmp_path / "cache"))  # fmt: skip
    train = BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, settings).build()[0]
    taken = np.bincount([train[i]["dataset_id"] for i in range(len(train))])
    for row, (name, count), samples in zip(rows.values(), sizes.items(), taken, strict=True):
        assert row["num_samples"] == samples
        assert row["realised"] == pytest.approx(samples / len(train))
        assert row["asked"] == pytest.approx(weights[name])
        assert row["num_epochs"] == pytest.approx(samples * 16 / count)
    assert rows["b"]["num_epochs"] > 3 > 1 > rows["a"]["num_epochs"]
    _, table = run(capsys, "blend", *words, *asked)
    assert "asked    epochs" in table
    assert not (tmp_path / "a").exists(), "no cache is left beside the corpora"
    _, whole = run(capsys, "blend", tmp_path / "a", tmp_path / "b", "--seq-length", 16)
    # Without weights and samples: the whole samples of each, once.
    assert [line.split()[-1] for line in whole.splitlines()[2:]] == ["0.975", "0.750"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "{}/c", "--documents", "9"], "has no document 9"),
        (["stats", "{}/nothing"], "no such corpus"),
        (["compare", "{}/c", "{}/nothing"], "no such corpus"),
        (["duplicates", "{}/empty"], "holds no corpus"),
    ],
)
def test_what_cannot_be_read_is_one_message(tmp_path, capsys, words, said):
    write_corpus(tmp_path / "c", random_documents(3, 4))
    (tmp_path / "empty").mkdir()
    assert inspect_dataset.main([word.format(tmp_path) for word in words]) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_corpora_are_compared_by_what_they_hold(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspection, "_BLOCK_TOKENS", 7)
    documents = random_documents(3, 40)
    first = write_corpus(tmp_path / "a", documents)
    wider = write_corpus(tmp_path / "b", documents, np.int32)
    assert run(capsys, "compare", first, wider) == (0, "equal: 40 documents\n")
    shorter = write_corpus(tmp_path / "c", documents[:-1])
    status, text = run(capsys, "compare", first, shorter)
    assert status == 1
    assert "number of documents: 40 in" in text
    cut = write_corpus(tmp_path / "d", [*documents[:5], documents[5][:-1], *documents[6:]])
    assert "length of document 5" in run(capsys, "compare", first, cut)[1]
    documents[20][0] = 0 if documents[20][0] else 1
    changed = write_corpus(tmp_path / "e", documents)
    assert "document 20, position 0: token" in run(capsys, "compare", changed, first)[1]
    sentences = with_sentences(tmp_path / "f")
    whole = write_corpus(tmp_path / "g", [[1, 2, 3, EOD], [], [4, 5], [1, 2, 3, EOD]])
    assert "sequences within documents" in run(capsys, "compare", sentences, whole)[1]


def test_exact_duplicates_are_found_within_and_between_corpora(tmp_path, capsys):
    documents = [np.unique(d) for d in random_documents(3, 50, longest=60)]
    documents = [np.append(d, 100 + i) for i, d in enumerate(documents)]
    first = write_corpus(tmp_path / "a", [*documents[:30], documents[3], [], documents[3], []])
    second = write_corpus(tmp_path / "b", [documents[40], documents[7]], np.int32)
    found = inspection.find_duplicates([IndexedDataset(p) for p in (first, second)])
    assert found.copies.tolist() == [[0, 30], [0, 32], [1, 1]]
    assert found.originals.tolist() == [[0, 3], [0, 3], [0, 7]]
    assert found.num_tokens_of_copies == 2 * len(documents[3]) + len(documents[7])
    status, text = run(capsys, "duplicates", tmp_path, "--list", tmp_path / "list")
    assert status == 1
    assert text.startswith("3 of 36 documents equal an earlier one (")
    lines = [json.loads(line) for line in (tmp_path / "list").read_text().splitlines()]
    assert lines[2] == {
        "corpus": second, "document": 1, "original": {"corpus": first, "document": 7}
    }  # fmt: skip


MODEL = [
    "--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "16",
    "--max-position-embeddings", "16", "--micro-batch-size", "2", "--global-batch-size", "4",
    "--train-iters", "6", "--eval-interval", "3", "--eval-iters", "1", "--lr", "1e-3",
    "--tokenizer-type", "ByteTokenizer",
]  # fmt: skip


def test_an_index_built_ahead_is_the_one_that_training_maps(tmp_path, capsys, everything_is_kept):
    prefixes = [write_corpus(tmp_path / name, random_documents(3, 60)) for name in "ab"]
    flags = [
        *MODEL, "--data-path", "1", prefixes[0], "2", prefixes[1], "--split", "8,1,1",
        "--data-cache-path", str(tmp_path / "cache"),
    ]  # fmt: skip
    assert build_index.main(flags) == 0
    assert "train: 24 samples of 2 corpora\nvalid: " in capsys.readouterr().out
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len([path for path in written if path.name.endswith("sample_index.npy")]) == 6
    assert build_index.main(flags) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == written
    assert build_index.main([*flags, "--seq-length", "-3"]) == 2
    assert "--seq-length" in capsys.readouterr().err
