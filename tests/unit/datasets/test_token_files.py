"""The `.bin`/`.idx` pair: its bytes, its checks, and what is left after a failure."""

import json
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.corpus import token_file
from megatron.core.datasets.corpus.files import token_files
from megatron.core.datasets.corpus.token_file import AtomicFile
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.processes import describe_exit

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 10]]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16, multimodal=False):
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype, multimodal=multimodal)
    for document in documents:
        for mode, sequence in enumerate(document):
            builder.add_item(np.array(sequence), mode)
        builder.end_document()
    builder.finalize(get_idx_path(prefix))
    return prefix


def by_the_format_table(documents, dtype, code, modes=None):
    """Return the bytes of both files, packed field by field."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    size = np.dtype(dtype).itemsize
    offsets = [sum(lengths[:i]) * size for i in range(len(lengths))]
    boundaries = [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]
    idx = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    idx += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(boundaries))
    idx += struct.pack(f"<{len(lengths)}i", *lengths)
    idx += struct.pack(f"<{len(offsets)}q", *offsets)
    idx += struct.pack(f"<{len(boundaries)}q", *boundaries)
    idx += struct.pack(f"<{len(lengths)}b", *modes) if modes is not None else b""
    tokens = [token for sequence in sequences for token in sequence]
    return np.array(tokens, np.dtype(dtype).newbyteorder("<")).tobytes(), idx


@pytest.mark.parametrize(
    ("dtype", "code"),
    [(np.uint8, 1), (np.int8, 2), (np.int16, 3), (np.int32, 4), (np.int64, 5), (np.uint16, 8)],
)
def test_the_files_are_byte_for_byte_those_of_the_format_table(tmp_path, dtype, code):
    prefix = write(str(tmp_path / "corpus"), dtype=dtype)
    expected_bin, expected_idx = by_the_format_table(DOCUMENTS, dtype, code)
    assert (tmp_path / "corpus.bin").read_bytes() == expected_bin
    assert (tmp_path / "corpus.idx").read_bytes() == expected_idx
    assert IndexedDataset(prefix).dtype == dtype


def test_multimodal_files_end_with_the_modes(tmp_path):
    prefix = write(str(tmp_path / "corpus"), multimodal=True)
    expected_bin, expected_idx = by_the_format_table(DOCUMENTS, np.uint16, 8, [0, 0, 1, 0])
    assert (tmp_path / "corpus.bin").read_bytes() == expected_bin
    assert (tmp_path / "corpus.idx").read_bytes() == expected_idx
    tokens, mode = IndexedDataset(prefix, multimodal=True)[2]
    assert (tokens.tolist(), int(mode)) == ([5, 6], 1)
    assert len(IndexedDataset(prefix)) == 4, "readable without the modes, too"


corpora = st.lists(
    st.lists(st.lists(st.integers(0, 65499), max_size=6), min_size=1, max_size=3), max_size=8
)


@given(documents=corpora, bulk=st.booleans(), mmap=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back_and_matches_the_table(
    tmp_path_factory, documents, bulk, mmap
):
    prefix = str(tmp_path_factory.mktemp("corpus") / "c")
    if bulk:
        sequences = [sequence for document in documents for sequence in document]
        tokens = np.array([token for sequence in sequences for token in sequence], np.uint16)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
        builder.add_documents(tokens, lengths, np.array([len(d) for d in documents], np.int64))
        builder.finalize(get_idx_path(prefix))
    else:
        write(prefix, documents)
    expected_bin, expected_idx = by_the_format_table(documents, np.uint16, 8)
    with open(get_bin_path(prefix), "rb") as file:
        assert file.read() == expected_bin
    with open(get_idx_path(prefix), "rb") as file:
        assert file.read() == expected_idx
    dataset = IndexedDataset(prefix, mmap=mmap)
    read = [
        [dataset[i].tolist() for i in range(begin, end)]
        for begin, end in zip(
            dataset.document_indices[:-1], dataset.document_indices[1:], strict=True
        )
    ]
    assert read == documents


def test_torch_tensors_lists_and_arrays_are_written_alike(tmp_path):
    for name, kind in [("a", torch.tensor), ("b", list), ("c", np.array)]:
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32)
        builder.add_document(kind([1, 2, 3, 4]), [3, 1])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()
        assert (tmp_path / f"{name}.idx").read_bytes() == (tmp_path / "a.idx").read_bytes()


def test_the_type_follows_the_vocabulary():
    assert DType.optimal_dtype(65499) is np.uint16
    assert DType.optimal_dtype(65500) is np.int32
    assert DType.optimal_dtype(None) is np.int32
    assert [(entry.name, entry.value) for entry in DType] == [
        ("uint8", 1), ("int8", 2), ("int16", 3), ("int32", 4),
        ("int64", 5), ("float64", 6), ("float32", 7), ("uint16", 8),
    ]  # fmt: skip
    assert DType.size(8) == 2
    assert DType.size(np.float64) == 8


def test_merging_another_type_is_refused_and_nothing_is_left(tmp_path):
    other = write(str(tmp_path / "a"), dtype=np.int32)
    with (
        pytest.raises(DataError, match="tokens of type int32 are added to tokens of type uint16"),
        IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.uint16) as builder,
    ):
        builder.add_index(other)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_an_id_that_the_type_cannot_hold_is_refused_instead_of_wrapped(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    with pytest.raises(DataError, match="token id 70000 does not fit into uint16"):
        builder.add_item([1, 70000])
    with pytest.raises(DataError, match="token id -1 does not fit"):
        builder.add_item([-1])
    builder.discard()


def put(at, layout, value):
    """Return a change of a file: `value` packed as `layout` at byte `at`."""
    size = struct.calcsize(layout)
    return lambda good: good[:at] + struct.pack(layout, value) + good[at + size :]


def cut(end):
    """Return a change of a file: only its first `end` bytes."""
    return lambda good: good[:end]


def more(count):
    """Return a change of a file: zeros at its end."""
    return lambda good: good + bytes(count)


# One change of the good files each: name, file, change, byte in the message, rest of the message.
# Four sequences (3, 1, 2, 4 tokens), three documents: offsets at 50, documents at 82, end 114.
DAMAGE = [
    ("magic", "idx", put(0, "c", b"X"), 0, "found b'XMIDIDX\\x00\\x00', expected the magic"),
    ("version", "idx", put(9, "<Q", 2), 9, "found version 2, expected version 1"),
    ("dtype", "idx", put(17, "B", 99), 17, "found dtype code 99"),
    ("header", "idx", cut(20), 20, "expected a header of 34 bytes (truncated file)"),
    ("truncated", "idx", cut(109), 109, "found a file of 109 bytes, expected 114"),
    ("longer", "idx", more(1), 114, "(bytes left over)"),
    ("count", "idx", put(18, "<Q", 2**40), 114, "(truncated file)"),
    ("no documents", "idx", put(26, "<Q", 0), 26, "an empty document array"),
    ("negative", "idx", put(38, "<i", -1), 38, "length -1 for sequence 1"),
    ("length", "idx", put(34, "<i", 2), 58, "offset 6 for sequence 1, expected 4"),
    ("offset", "idx", put(66, "<q", 9), 66, "offset 9 for sequence 2, expected 8"),
    ("last length", "idx", put(46, "<i", 9), 20, "expected 30 bytes"),
    ("first document", "idx", put(82, "<q", 1), 82, "first document at 1, expected 0"),
    ("falling", "idx", put(98, "<q", 0), 98, "boundary 0, expected 1 or more"),
    ("last document", "idx", put(106, "<q", 9), 106, "boundary 9, expected 4"),
    ("bin short", "bin", cut(19), 19, "found a file of 19 bytes, expected 20"),
    ("bin empty", "bin", cut(0), 0, "found a file of 0 bytes"),
    ("bin long", "bin", more(2), 20, "(bytes left over)"),
]


@pytest.mark.parametrize(
    ("suffix", "change", "position", "text"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_a_damaged_pair_is_refused_with_file_and_byte(
    tmp_path, suffix, change, position, text, implementation
):
    prefix = write(str(tmp_path / "corpus"))
    path = tmp_path / f"corpus.{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    message = str(caught.value)
    assert message.startswith(f"{prefix}.")
    assert f"byte {position}: " in message
    assert text in message
    assert "fix:   copy both files again" in message


def test_every_cut_and_every_changed_structural_byte_is_noticed(tmp_path, implementation):
    prefix = write(str(tmp_path / "corpus"))
    path = tmp_path / "corpus.idx"
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at])
        with pytest.raises(DataError):
            IndexedDataset(prefix)
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        # A boundary moved within its bounds is another valid grouping, nothing else is.
        if not 90 <= at < 106:
            with pytest.raises(DataError):
                IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("corpus", "did you mean {dir}/corpus_text_document?"),
        ("corpus_text_document.bin", "leave out the suffix: {dir}/corpus_text_document"),
        ("missing/corpus", "the directory {dir}/missing does not exist"),
        ("other", "write the corpus with tools/preprocess_data.py"),
    ],
)
def test_a_missing_corpus_is_named_with_a_hint(tmp_path, asked, hint):
    write(str(tmp_path / "corpus_text_document"))
    with pytest.raises(DataError) as caught:
        IndexedDataset(str(tmp_path / asked))
    assert f"{tmp_path}/{asked}.bin and {tmp_path}/{asked}.idx not found" in str(caught.value)
    assert hint.format(dir=tmp_path) in str(caught.value)


@pytest.mark.parametrize(("function", "file"), [("fill_tokens", "c.bin"), ("fill_index", "c.idx")])
def test_a_full_disk_is_named_with_path_and_bytes_and_leaves_nothing(tmp_path, function, file):
    code = f"from tests.unit.datasets.full_disk import {function}; {function}({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd()
    )
    assert f"no space left while writing {tmp_path}/{file}: " in done.stdout
    assert " bytes were written" in done.stdout
    assert f"fix:   free space on the file system of {tmp_path}" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_an_old_corpus_survives_a_failed_rewrite(tmp_path):
    prefix = write(str(tmp_path / "c"))
    with (
        pytest.raises(DataError),
        IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16) as builder,
    ):
        builder.add_item([1 << 20])
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]


def test_the_digest_of_a_shape_changes_with_the_documents(tmp_path):
    prints = [
        IndexedDataset(write(str(tmp_path / "c"), documents)).shape_digest()
        for documents in (DOCUMENTS, DOCUMENTS[:-1], [*DOCUMENTS, [[1]]], DOCUMENTS)
    ]
    assert len(set(prints)) == 3
    assert prints[0] == prints[3]


def test_more_corpora_can_be_open_than_the_soft_limit_of_files(tmp_path):
    prefix = write(str(tmp_path / "corpus"))
    code = f"""
import gc, resource
from megatron.core.datasets.indexed_dataset import IndexedDataset
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 400))
views = [IndexedDataset({prefix!r})[0] for _ in range(100)]
gc.collect()
assert all((view == views[0]).all() and not view.flags.writeable for view in views)
maps = lambda: open("/proc/self/maps").read().count("corpus.")
held = maps()
del views
gc.collect()
print(held, maps())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "100 0\n"


def test_a_link_under_a_temporary_name_is_not_followed(tmp_path, monkeypatch):
    # In a folder that others can write, somebody may have made it, even with the right name.
    victim = tmp_path / "thesis"
    victim.write_text("years of work")
    monkeypatch.setattr(token_file.secrets, "token_hex", lambda count: "0" * 2 * count)
    (tmp_path / f"x.npy.partial-{os.getpid()}").symlink_to(victim)
    (tmp_path / f"x.npy.partial-{os.getpid()}-00000000").symlink_to(victim)
    with pytest.raises(DataError, match="cannot write"):
        AtomicFile(str(tmp_path / "x.npy"))
    monkeypatch.undo()
    file = AtomicFile(str(tmp_path / "x.npy"))
    file.write(b"new")
    file.commit()
    assert victim.read_text() == "years of work"
    assert not (tmp_path / "x.npy").is_symlink()


def test_files_have_the_permissions_that_the_user_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        file = AtomicFile(str(tmp_path / "x"))
        file.commit()
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


SHRINKS = """
import os, sys
from megatron.core.datasets.corpus.token_file import mapped

def read():
    tokens = mapped(sys.argv[1])
    os.truncate(sys.argv[1], 0)
    print(tokens[100_000])
"""
ALONE = """
from megatron.core.foundation.processes import name_fatal_signals
name_fatal_signals()
read()
"""
IN_A_RUN = """
from torch.distributed import HashStore
from megatron.resilience.status import RunStatus
from megatron.training.setup.initialize import start_session
start_session(read, RunStatus(), store=HashStore())
"""


@pytest.mark.parametrize("reading", [ALONE, IN_A_RUN], ids=["alone", "in a run"])
def test_a_mapped_file_that_shrinks_ends_the_process_with_words(tmp_path, reading):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", SHRINKS + reading, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert "<module>" in done.stderr
    assert "a file that it had mapped became shorter" in describe_exit(done.returncode)


@pytest.mark.parametrize("name", ["../../../../../../../../etc/passwd", "/etc/x.bin", "x.bin.txt"])
def test_a_list_of_parts_cannot_name_any_file(tmp_path, name):
    prefix = write(str(tmp_path / "a"))
    size = os.path.getsize("/etc/passwd")
    os.unlink(f"{prefix}.bin")
    parts = {"parts": [{"bin": name, "bytes": size}]}
    with open(f"{prefix}.bin.parts", "w") as file:
        json.dump(parts, file)
    with pytest.raises(DataError, match=r"names '.*' as a part of the corpus"):
        token_files(f"{prefix}.bin")
