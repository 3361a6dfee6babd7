"""A sound file is checked once on a machine, and again after anything was done to it."""

import os
import tempfile

import pytest

from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.corpus import validation_cache
from megatron.core.datasets.corpus.validation_cache import check_once
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.foundation.errors import DataError
from tests.unit.datasets.corpora import write_corpus


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "machine"))
    monkeypatch.setattr(validation_cache, "_SETTLED_AFTER_NS", -1)
    file = tmp_path / "file"
    file.write_bytes(b"sound")
    return file


def nothing():
    pass


def rewritten(path):
    status = path.stat()
    path.write_bytes(b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a careful copy does


def replaced(path):
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"other")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_a_check_is_made_once_and_again_after_any_change(path, change):
    assert [check_once(str(path), nothing) for _ in range(3)] == [True, False, False]
    change(path)
    assert [check_once(str(path), nothing) for _ in range(2)] == [True, False]


def test_a_check_counts_until_the_machine_starts_anew(path, monkeypatch):
    assert check_once(str(path), nothing)
    monkeypatch.setattr(validation_cache, "_boot", lambda: "another start")
    assert check_once(str(path), nothing)
    monkeypatch.setattr(validation_cache, "_boot", lambda: "")  # not told by this system
    assert check_once(str(path), nothing) and check_once(str(path), nothing)


def test_what_fails_is_checked_again(path):
    def fails():
        raise DataError("damaged.")

    for _ in range(2):
        with pytest.raises(DataError):
            check_once(str(path), fails)


def test_a_file_that_changed_a_moment_ago_is_not_remembered(path, monkeypatch):
    monkeypatch.setattr(validation_cache, "_SETTLED_AFTER_NS", 60_000_000_000)
    assert check_once(str(path), nothing) and check_once(str(path), nothing)


def test_records_of_others_do_not_count(path, monkeypatch):
    assert check_once(str(path), nothing)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    (folder,) = (path.parent / "machine").iterdir()
    folder.rename(folder.with_name(f"checked-corpora-{other}"))
    assert check_once(str(path), nothing)


@pytest.mark.parametrize("kind", ["link", "open to others"])
def test_records_in_a_folder_that_others_can_reach_do_not_count(path, kind):
    # Somebody else made the folder first, in the shared one, with a forged record in it.
    assert check_once(str(path), nothing)
    (folder,) = (path.parent / "machine").iterdir()
    if kind == "link":
        folder = folder.rename(path.parent / "elsewhere")
        (path.parent / "machine" / f"checked-corpora-{os.getuid()}").symlink_to(folder)
    else:
        folder.chmod(0o777)
    before = sorted(folder.iterdir())
    assert check_once(str(path), nothing)
    path.with_name("more").write_bytes(b"sound")
    assert check_once(str(path.with_name("more")), nothing)
    assert sorted(folder.iterdir()) == before


def test_a_record_that_is_a_link_does_not_count(path):
    assert check_once(str(path), nothing)
    (folder,) = (path.parent / "machine").iterdir()
    (record,) = folder.iterdir()
    record.rename(path.with_name("record"))
    record.symlink_to(path.with_name("record"))
    assert check_once(str(path), nothing)


def test_a_corpus_that_passed_is_not_read_again_and_still_must_fit_its_tokens(path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "_WORTH_REMEMBERING", 1)
    prefix = write_corpus(path.parent / "c", [[1, 2, 3], [4, 5]])
    IndexedDataset(prefix)
    monkeypatch.setattr(indexed_dataset, "check_index", None)
    assert IndexedDataset(prefix)[1].tolist() == [4, 5]
    with open(prefix + ".bin", "ab") as tokens:
        tokens.write(b"\0\0")
    with pytest.raises(DataError, match="bytes left over"):
        IndexedDataset(prefix)
