"""Index arrays are built once, checked when read, and never half there."""

import logging
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from megatron.core.datasets import gpt_dataset as gpt_module
from megatron.core.datasets.order import index_cache
from megatron.core.datasets.order.index_cache import Expected, IndexCache, checksums_of
from tests.unit.datasets.corpora import gpt_dataset, random_documents, write_corpus

EXPECTED = {"order": Expected((np.int32,), (5,))}


def cache_in(folder):
    return IndexCache(directory=str(folder), stem="abc-Thing-train", description="made of this")


def build():
    return {"order": np.arange(5, dtype=np.int32)}


def never():
    raise AssertionError("the cache was there")


def test_a_second_process_maps_what_the_first_built(tmp_path):
    first = cache_in(tmp_path).load_or_build(build, EXPECTED)
    second = cache_in(tmp_path).load_or_build(never, EXPECTED)
    assert isinstance(second["order"], np.memmap)
    assert np.array_equal(first["order"], second["order"])
    kinds = ("order.npy", "description.txt", "crc32.json", "lock")
    names = {f"abc-Thing-train-{kind}" for kind in kinds}
    assert set(os.listdir(tmp_path)) == names
    assert (tmp_path / "abc-Thing-train-description.txt").read_text() == "made of this"


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    cache.mkdir()
    os.symlink(elsewhere, cache / "abc-Thing-train-lock")
    built = cache_in(cache).load_or_build(build, EXPECTED)
    assert np.array_equal(built["order"], build()["order"])
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not numpy",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i4'}",
        np.arange(4, dtype=np.int32),
        np.arange(5, dtype=np.int64),
        np.array([[1], [2]], dtype=np.int32),
    ],
    ids=["empty", "garbage", "header", "shape", "dtype", "dimensions"],
)
def test_a_damaged_cache_is_built_again(tmp_path, content, caplog):
    cache_in(tmp_path).load_or_build(build, EXPECTED)
    path = tmp_path / "abc-Thing-train-order.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    again = cache_in(tmp_path).load_or_build(build, EXPECTED)
    assert again["order"].tolist() == [0, 1, 2, 3, 4]
    assert "built again" in caplog.text
    assert cache_in(tmp_path).load_or_build(never, EXPECTED)["order"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["order.npy", "description.txt", "crc32.json"])
def test_one_changed_byte_anywhere_in_a_cache_is_noticed(tmp_path, name, caplog):
    cache_in(tmp_path).load_or_build(build, EXPECTED)
    path = tmp_path / f"abc-Thing-train-{name}"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert cache_in(tmp_path).load_or_build(build, EXPECTED)["order"].tolist() == [0, 1, 2, 3, 4]
    assert "built again" in caplog.text
    cache_in(tmp_path).load_or_build(never, EXPECTED)


def test_checksums_cover_every_chunk(monkeypatch):
    monkeypatch.setattr(index_cache, "_CHUNK_BYTES", 64)
    array = np.arange(100, dtype=np.int32)
    before = checksums_of(array)
    assert len(before) == 7
    for at in range(0, 100, 7):
        changed = array.copy()
        changed[at] += 1
        assert checksums_of(changed) != before


def test_a_pickle_in_the_place_of_an_array_is_not_executed(tmp_path):
    class Canary:
        def __reduce__(self):
            return open, (str(tmp_path / "canary"), "w")

    cache_in(tmp_path).load_or_build(build, EXPECTED)
    path = tmp_path / "abc-Thing-train-order.npy"
    np.save(path, np.array([Canary()] * 5, dtype=object), allow_pickle=True)
    cache_in(tmp_path).load_or_build(build, EXPECTED)
    assert not (tmp_path / "canary").exists()


def test_of_many_at_once_only_one_builds(tmp_path):
    built, results = [], []

    def slow():
        built.append(1)
        time.sleep(0.3)
        return build()

    def work():
        results.append(cache_in(tmp_path).load_or_build(slow, EXPECTED)["order"].tolist())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert results == [[0, 1, 2, 3, 4]] * 6


def test_nobody_waits_for_a_builder_that_was_killed(tmp_path):
    command = [sys.executable, "-m", "tests.unit.datasets.build_and_die", str(tmp_path)]
    with subprocess.Popen([*command, "die"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "building\n"
        with subprocess.Popen([*command, "live"], stdout=subprocess.PIPE, text=True) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(timeout=1.0)
            first.kill()
            assert second.communicate(timeout=60)[0] == "[0, 1, 2, 3, 4]\n"


def test_a_directory_that_cannot_be_made_means_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    arrays = cache_in(tmp_path / "file" / "cache").load_or_build(build, EXPECTED)
    assert not isinstance(arrays["order"], np.memmap)
    assert "kept in memory" in caplog.text


def test_a_dataset_is_indexed_once_and_again_when_anything_changes(
    tmp_path, monkeypatch, caplog, everything_is_kept
):
    caplog.set_level(logging.INFO)
    builds = []
    original = gpt_module.build_document_index
    monkeypatch.setattr(
        gpt_module, "build_document_index", lambda *a: builds.append(1) or original(*a)
    )
    documents = random_documents(5, 50)
    prefix = write_corpus(tmp_path / "c", documents)

    def built(**settings):
        before = len(builds)
        gpt_dataset(prefix, settings.pop("num_samples", 20), **settings)
        return len(builds) - before

    assert built() == 1
    assert built() == 0
    assert built(num_samples=21) == 1
    assert built(random_seed=8) == 1
    assert built(sequence_length=8) == 1
    assert built(add_extra_token_to_sequence=False) == 1
    assert built() == 0
    write_corpus(prefix, documents[:-1])
    assert built() == 1, "another corpus under the same name"
    folder = tmp_path / "c" / "cache" / "GPTDataset_indices"
    kinds = {name.split("-", 1)[1] for name in os.listdir(folder)}
    assert kinds == {
        f"GPTDataset-train-{name}"
        for name in [
            "description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy",
            "crc32.json", "lock",
        ]
    }  # fmt: skip
    assert built(path_to_cache=str(tmp_path / "elsewhere")) == 1
    assert len(os.listdir(tmp_path / "elsewhere")) == 6
