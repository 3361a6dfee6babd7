"""Every kind of input gives the same documents; damaged ones are named with the place."""

import gzip
import json
import sys
import tracemalloc

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing import job
from megatron.core.datasets.preprocessing.flags import rank_and_world, shards_of
from megatron.core.datasets.preprocessing.inputs import expand_inputs, share_of
from megatron.core.datasets.preprocessing.units import blocks_of, read_units
from megatron.core.foundation.errors import ConfigError, DataError
from tools import merge_datasets, preprocess_data

TEXTS = [f"Zeile {i} über 漢字 {'x' * (i % 50)}" for i in range(200)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    real = job.read_units
    monkeypatch.setattr(job, "read_units", lambda *a, **k: real(*a, **{**k, "unit_bytes": 512}))


def run(tmp_path, *inputs, flags=()):
    return preprocess_data.main(
        ["--input", *map(str, inputs), "--output-prefix", str(tmp_path / "out"), "--workers", "0",
         "--tokenizer-type", "ByteTokenizer", *flags]
    )  # fmt: skip


def texts_of(prefix):
    dataset = IndexedDataset(str(prefix))
    return [bytes(sequence.astype(np.uint8)).decode() for sequence in dataset[:]]


def lines(texts):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def write_parquet(path, texts, **columns):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": texts, "n": list(range(len(texts))), **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=70)


def write_zst(path, data):
    import zstandard

    # Two frames, as parallel compressors write them.
    half = len(data) // 2
    parts = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
    path.write_bytes(b"".join(parts))


def make_input(tmp_path, kind):
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        write_parquet(path, TEXTS)
    elif kind == "jsonl.zst":
        write_zst(path, lines(TEXTS))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines(TEXTS)))
    elif kind == "crlf.jsonl":
        path.write_bytes(b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n"))
    else:
        path.write_bytes(lines(TEXTS)[:-1])  # no end of line at the end of the file
    return path


@pytest.mark.parametrize("kind", ["jsonl", "crlf.jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_every_format_gives_the_same_documents(tmp_path, kind):
    assert run(tmp_path, make_input(tmp_path, kind)) == 0
    assert texts_of(tmp_path / "out_text_document") == TEXTS


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_reading_can_go_on_from_every_unit(tmp_path, kind):
    files = expand_inputs([str(make_input(tmp_path, kind))])
    units = list(read_units(files, keys=["text"], unit_bytes=512))
    assert len(units) > 3
    for at, unit in enumerate(units[:-1], 1):
        rest = read_units(files, keys=["text"], start=unit.next_position, unit_bytes=512)
        assert list(rest) == units[at:]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("jsonl.gz", "in.jsonl.gz: cannot be decompressed after 0 bytes of text"),
        ("jsonl.zst", "in.jsonl.zst: cannot be decompressed after"),
        ("parquet", "in.parquet, row group 0, row 1: cannot be read"),
    ],
)
@pytest.mark.parametrize("damage", ["cut", "emptied", "overwritten"])
def test_a_damaged_file_is_named(tmp_path, capsys, kind, message, damage):
    path = make_input(tmp_path, kind)
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[:-9])
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.write_bytes(whole[:30] + b"\xa5" * 30 + whole[60:])
    assert run(tmp_path, path) == 1
    found = capsys.readouterr().err
    assert message.split(" after")[0].split(", row")[0] in found
    assert "cannot be" in found
    if kind == "parquet":
        assert "row group" in found
    assert not list(tmp_path.glob("out*.bin")) + list(tmp_path.glob("out*.idx"))


def test_faulty_rows_and_missing_columns_of_parquet_are_named(tmp_path, capsys):
    write_parquet(tmp_path / "in.parquet", [*TEXTS[:100], None, *TEXTS[100:]])
    assert run(tmp_path, tmp_path / "in.parquet") == 1
    assert "in.parquet, row 101: 'text' is not text (found NoneType)" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "in.parquet", flags=["--skip-bad-lines", "--restart"]) == 0
    assert texts_of(tmp_path / "out_text_document") == TEXTS
    assert run(tmp_path, tmp_path / "in.parquet", flags=["--json-keys", "body"]) == 1
    assert "has no column 'body'; it has 'text', 'n'" in capsys.readouterr().err


def test_plain_text_is_one_document_a_file_or_a_line(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    (folder / "deeper/b.txt").write_text("three")
    (folder / "empty.txt").write_text("")
    assert run(tmp_path, folder, flags=["--input-format", "text"]) == 0
    assert texts_of(tmp_path / "out_text_document") == ["one\ntwo\n", "three"]
    assert run(tmp_path, folder / "a.txt", flags=["--input-format", "text-lines"]) == 0
    assert texts_of(tmp_path / "out_text_document") == ["one", "two"]
    (folder / "c.txt").write_bytes(b"caf\xe9")
    assert run(tmp_path, folder / "*.txt", flags=["--skip-bad-lines"]) == 0
    assert texts_of(tmp_path / "out_text_document") == ["one\ntwo\n"]


def test_urls_are_read_through_fsspec(tmp_path, capsys):
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/corpus/a.jsonl", lines(TEXTS[:100]))
    system.pipe("/corpus/b.jsonl.gz", gzip.compress(lines(TEXTS[100:])))
    assert run(tmp_path, "memory://corpus/a.jsonl", "memory://corpus/b.jsonl.gz") == 0
    assert texts_of(tmp_path / "out_text_document") == TEXTS
    assert run(tmp_path, "memory://corpus/*.jsonl*") == 0
    assert run(tmp_path, "memory://corpus") == 0
    assert texts_of(tmp_path / "out_text_document") == TEXTS
    (tmp_path / "in.jsonl").write_bytes(lines(TEXTS))
    assert run(tmp_path, f"file://{tmp_path}/in.jsonl") == 0
    assert texts_of(tmp_path / "out_text_document") == TEXTS
    capsys.readouterr()
    assert run(tmp_path, "memory://nowhere/x.jsonl") == 1
    assert "no such file" in capsys.readouterr().err
    assert run(tmp_path, "gopher://host/x.jsonl") == 1
    assert "gopher://host/x.jsonl cannot be read" in capsys.readouterr().err


def test_without_its_library_the_extra_is_named(tmp_path, capsys, monkeypatch):
    path = make_input(tmp_path, "jsonl.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert run(tmp_path, path) == 1
    assert "megatron-lattice[data]" in capsys.readouterr().err


def test_long_lines_and_odd_contents_pass(tmp_path):
    long = "x" * 20_000_000
    odd = ["a\x00b", "\u2028\x85 not ends of lines", "", "🏴‍☠️"]
    (tmp_path / "in.jsonl").write_bytes(
        lines([*odd[:2], long, *odd[2:]]) + b'{"text": "e", "n": NaN}'
    )
    assert run(tmp_path, tmp_path / "in.jsonl") == 0
    assert texts_of(tmp_path / "out_text_document") == [*odd[:2], long, odd[3], "e"]


def test_an_empty_input_gives_an_empty_corpus(tmp_path):
    for name in ("in.jsonl", "in.txt"):
        (tmp_path / name).write_bytes(b"")
        assert run(tmp_path, tmp_path / name) == 0
        assert len(IndexedDataset(str(tmp_path / "out_text_document"))) == 0


# --- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [2, 3, 7, 50])
def test_joined_shards_equal_one_run(tmp_path, num_shards):
    """Of a plain file, a compressed one and a parquet file; the shards made in reverse order."""
    inputs = [make_input(tmp_path, kind) for kind in ("jsonl", "jsonl.gz", "parquet")]
    flags = ["--num-shards", str(num_shards), "--append-eod"]
    for rank in reversed(range(2)):
        assert run(tmp_path, *inputs, flags=[*flags, "--rank", str(rank), "--world-size", "2"]) == 0
    shards = sorted(tmp_path.glob(f"out-*-of-{num_shards:05d}_text_document.idx"))
    assert len(shards) == num_shards
    merge = ["--input", *map(str, shards), "--output-prefix", str(tmp_path / "joined")]
    assert merge_datasets.main(merge) == 0
    assert run(tmp_path, *inputs, flags=["--append-eod"]) == 0
    for end in (".bin", ".idx"):
        whole = (tmp_path / f"out_text_document{end}").read_bytes()
        assert (tmp_path / f"joined{end}").read_bytes() == whole


def test_a_folder_of_shards_is_joined_by_key_and_only_when_it_is_complete(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": t, "b": t[::-1]}) + "\n" for t in TEXTS))
    flags = ["--json-keys", "text", "b"]
    assert run(tmp_path, path, flags=[*flags, "--num-shards", "3"]) == 0
    (tmp_path / "shards").mkdir()
    for file in tmp_path.glob("out-*"):
        file.rename(tmp_path / "shards" / file.name)
    merge = ["--input", str(tmp_path / "shards"), "--output-prefix", str(tmp_path / "joined")]
    assert merge_datasets.main(merge) == 0
    assert run(tmp_path, path, flags=flags) == 0
    for end in ("_text_document.bin", "_b_document.bin", "_text_document.idx", "_b_document.idx"):
        assert (tmp_path / f"joined{end}").read_bytes() == (tmp_path / f"out{end}").read_bytes()
    capsys.readouterr()
    (tmp_path / "shards/out-00001-of-00003_b_document.idx").unlink()
    assert merge_datasets.main([*merge, "--no-copy"]) == 1
    said = capsys.readouterr().err
    assert "1 of 3 shards of" in said
    assert "out-00001-of-00003_b_document first" in said


@pytest.mark.parametrize("mmap", [True, False])
def test_shards_joined_without_copying_read_like_the_whole(tmp_path, mmap):
    path = make_input(tmp_path, "jsonl")
    assert run(tmp_path, path, flags=["--num-shards", "3"]) == 0
    shards = [f"{tmp_path}/out-{i:05d}-of-00003_text_document" for i in range(3)]
    (tmp_path / "elsewhere").mkdir()
    joined = str(tmp_path / "elsewhere/joined")
    merge = ["--input", *shards, "--output-prefix", joined, "--no-copy"]
    assert merge_datasets.main(merge) == 0
    assert not (tmp_path / "elsewhere/joined.bin").exists()
    dataset = IndexedDataset(joined, mmap=mmap)
    assert texts_of(joined) == TEXTS
    whole = np.concatenate(dataset[:])
    over_all = dataset._tokens.read(dataset.dtype, len(whole), 0)
    assert np.array_equal(over_all, whole)
    assert run(tmp_path, path) == 0
    index = (tmp_path / "out_text_document.idx").read_bytes()
    assert (tmp_path / "elsewhere/joined.idx").read_bytes() == index
    copied = str(tmp_path / "copied")
    assert merge_datasets.main(["--input", joined, "--output-prefix", copied]) == 0
    tokens = (tmp_path / "out_text_document.bin").read_bytes()
    assert (tmp_path / "copied.bin").read_bytes() == tokens


def test_a_joined_corpus_without_one_of_its_parts_is_refused(tmp_path, capsys):
    path = make_input(tmp_path, "jsonl")
    assert run(tmp_path, path, flags=["--num-shards", "2"]) == 0
    shards = [f"{tmp_path}/out-{i:05d}-of-00002_text_document" for i in range(2)]
    joined = str(tmp_path / "joined")
    merge = ["--input", *shards, "--output-prefix", joined, "--no-copy"]
    assert merge_datasets.main(merge) == 0
    part = tmp_path / "out-00001-of-00002_text_document.bin"
    content = part.read_bytes()
    part.write_bytes(content[:-2])
    with pytest.raises(DataError, match=f"has {len(content) - 2:,} bytes; it had"):
        IndexedDataset(joined)
    part.unlink()
    with pytest.raises(DataError, match="is missing"):
        IndexedDataset(joined)
    (tmp_path / "joined.bin.parts").write_text("{}")
    with pytest.raises(DataError, match="is not a list of parts"):
        IndexedDataset(joined)
    assert merge_datasets.main(["--input", shards[0], "--output-prefix", shards[0], "--no-copy"])
    assert "exists" in capsys.readouterr().err


def test_a_faulty_line_of_a_shard_has_its_number_in_the_file(tmp_path, capsys):
    content = lines(TEXTS).split(b"\n")
    content[150] = b"not JSON"
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(content))
    for shard in range(5):
        files = share_of(expand_inputs([str(tmp_path / "in.jsonl")]), shard, 5)
        assert len(files) == 1
    failed = [
        run(tmp_path, tmp_path / "in.jsonl",
            flags=["--num-shards", "5", "--rank", str(rank), "--world-size", "5"])
        for rank in range(5)
    ]  # fmt: skip
    assert sorted(failed) == [0, 0, 0, 0, 1]
    assert "in.jsonl, line 151: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, (None, None), (0, 1)),
        ({}, (2, 4), (2, 4)),
        ({"SLURM_ARRAY_TASK_ID": "3"}, (None, None), (3, 8)),
        ({"SLURM_ARRAY_TASK_ID": "3"}, (None, 4), (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (None, None), (1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (None, None), (1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (0, 2), (0, 2)),
    ],
)
def test_rank_and_size_come_from_flags_then_from_the_scheduler(environment, flags, expected):
    assert rank_and_world(8, *flags, environment) == expected


def test_every_shard_has_one_owner_and_wrong_ranks_are_refused():
    for world_size in (1, 3, 8, 20):
        owned = [shard for rank in range(world_size) for shard in shards_of(rank, world_size, 8)]
        assert sorted(owned) == list(range(8))
    with pytest.raises(ConfigError, match="SLURM_ARRAY_TASK_ID 8 among 8"):
        rank_and_world(8, None, None, {"SLURM_ARRAY_TASK_ID": "8"})
    with pytest.raises(ConfigError, match="shard 3 of 3"):
        share_of([], 3, 3)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    from megatron.core.datasets.preprocessing.documents import documents_of

    path = make_input(tmp_path, "jsonl")
    last = list(read_units(expand_inputs([str(path)]), keys=["text"], unit_bytes=512))[-1]
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match="must not change"):
        documents_of(last, ["text"])


def test_a_compressed_file_is_expanded_in_pieces_of_bounded_size(tmp_path):
    # Few bytes of zstd stand for many: four for 128 KiB.
    import zstandard

    frame = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    zeros = bytes(1 << 20)
    data = b"".join(frame.compress(zeros) for _ in range(256)) + frame.flush()
    assert len(data) < 20_000
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        sizes = [len(block) for block, _ in blocks_of(str(path))]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) == 256 << 20
    assert max(sizes) <= 18 << 20
    assert peak < 64 << 20


def test_a_folder_of_text_alone_stands_for_its_text(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.txt", "deep/a.md", ".hidden.txt", "picture.png"):
        (folder / name).write_text(name)
    found = expand_inputs([str(folder)])
    assert [file.path for file in found] == [str(folder / n) for n in ("b.txt", "deep/a.md")]
    (folder / "records.jsonl").write_text("{}")  # then the text only describes them
    assert [file.path for file in expand_inputs([str(folder)])] == [str(folder / "records.jsonl")]
