"""Checkpoints in an object store: metadata.json last, ranged reads, no rename and no lock."""

import pickle
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, commit
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, storage_path
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from tests.unit.dist_checkpointing.ranks import must_succeed, run_ranks
from tests.unit.dist_checkpointing.runs import load, save
from tests.unit.dist_checkpointing.states import Layout, declare, global_state, values
from tools.checkpoint import __main__ as tool
from tools.checkpoint.state_digest import checkpoint_digest


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path: Path) -> Iterator[str]:
    """A new save directory in a store of each kind."""
    if request.param == "file":
        yield f"file://{tmp_path}/run"
        return
    where = f"memory://{secrets.token_hex(6)}"
    yield where
    fsspec.filesystem("memory").rm(where, recursive=True)


def objects(url: str) -> dict[str, bytes]:
    """Return all objects under a URL."""
    files, path = fsspec.core.url_to_fs(url)
    return {name: files.cat_file(name) for name in files.find(path)}


def flip_last_bit(url: str) -> None:
    """Damage one object."""
    files, path = fsspec.core.url_to_fs(url)
    data = bytearray(files.cat_file(path))
    data[-1] ^= 1
    files.pipe_file(path, bytes(data))


def test_any_layout_loads_what_another_saved(url: str, ram_path: Path) -> None:
    state = global_state(3)
    source, wanted = Layout(tp=2, pp=2, dp=2, is_zero=True), Layout(tp=4, dp=1)
    for where in (f"{url}/iter_0000005", ram_path / "iter_0000005"):
        must_succeed(
            run_ranks(
                source.size,
                lambda peers, where=where: dist_checkpointing.save(
                    {"t": declare(state, source, peers.rank), "step": 5}, where, process_group=peers
                ),
            )
        )

    def read(peers) -> None:
        template = declare(None, wanted, peers.rank)
        found = dist_checkpointing.load({"t": template}, f"{url}/iter_0000005", process_group=peers)
        expected = values(declare(state, wanted, peers.rank))
        assert found["step"] == 5
        for name, tensor in found["t"].items():
            assert torch.equal(tensor, expected[name]), name

    must_succeed(run_ranks(wanted.size, read))
    place = storage_path(f"{url}/iter_0000005")
    assert checkpoint_digest(place) == checkpoint_digest(ram_path / "iter_0000005")
    assert not verify_checkpoint(place).problems
    assert pickle.loads(pickle.dumps(place)) == place


def test_a_run_saves_keeps_and_goes_on(url: str, capsys) -> None:
    for iteration in (5, 10, 15):
        save(url, iteration, save_retain_interval=10)
    names = [found.path.name for found in commit.list_checkpoints(storage_path(url)).checkpoints]
    assert names == ["iter_0000015", "iter_0000010"]
    assert load(url) == 15
    flip_last_bit(f"{url}/iter_0000015/__0_0.safetensors")
    assert load(url) == 10
    assert "__0_0.safetensors is corrupt" in capsys.readouterr().out
    save(url, 15)  # the damaged one is replaced
    assert load(url) == 15
    for words in (["inspect", url], ["verify", url, "--all"], ["digest", url]):
        assert tool.main(words) == 0
    assert load(f"{url}/empty") is None


def test_tools_write_to_and_delete_from_a_store(url: str) -> None:
    for iteration in (5, 10):
        save(url, iteration)
    assert tool.main(["reshard", url, f"{url}/whole", "--files", "2"]) == 0
    source, whole = storage_path(f"{url}/iter_0000010"), storage_path(f"{url}/whole/iter_0000010")
    assert checkpoint_digest(whole) == checkpoint_digest(source)
    assert load(f"{url}/whole") == 10
    assert tool.main(["average", f"{url}/mean", f"{url}/iter_0000005", f"{url}/iter_0000010"]) == 0
    mean = dist_checkpointing.load_plain_tensors(f"{url}/mean/release")
    assert mean["first.weight"].unique().tolist() == [7.5]
    for words, left in (([], 2), (["--yes"], 1)):
        assert tool.main(["prune", url, *words]) == 0
        assert len(commit.list_checkpoints(storage_path(url)).checkpoints) == left
    assert load(url) == 10


class DyingStore(MemoryFileSystem):
    """Refuses every write after the first few."""

    protocol = "dying"
    cacheable = False
    writes_left = 0

    def _spend(self) -> None:
        if DyingStore.writes_left <= 0:
            raise OSError("the connection is gone")
        DyingStore.writes_left -= 1

    def _open(self, path, mode="rb", **kwargs):
        if "w" in mode:
            self._spend()
        return super()._open(path, mode, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._spend()
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def rm_file(self, path):
        self._spend()
        return super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        self._spend()
        return super().rm(path, recursive=recursive, maxdepth=maxdepth)


def test_a_store_that_fails_at_any_write_keeps_the_old_state() -> None:
    fsspec.register_implementation("dying", DyingStore, clobber=True)
    url, outcomes, messages = f"dying://{secrets.token_hex(6)}", [], []
    DyingStore.writes_left = 100
    save(url, 5)
    for writes in range(20):
        DyingStore.writes_left = writes
        try:
            save(url, 10)
            break
        except CheckpointError as error:
            messages.append(str(error))
        DyingStore.writes_left = 100
        outcomes.append(load(url))
        if outcomes[-1] == 10:  # only the tracker was missing
            ObjectDirectory(f"{url}/iter_0000010").remove(first="metadata.json")
    assert set(outcomes) == {5, 10}
    assert all("dying://" in message for message in messages)
    assert len(outcomes) >= 4
    DyingStore.writes_left = 100
    assert load(url) == 10
    fsspec.filesystem("dying").rm(url, recursive=True)


def test_without_its_metadata_a_checkpoint_does_not_exist(url: str, capsys) -> None:
    save(url, 5)
    save(url, 10)
    files, path = fsspec.core.url_to_fs(f"{url}/iter_0000010/metadata.json")
    files.rm_file(path)
    assert load(url) == 5
    assert "ignoring" in capsys.readouterr().out


def test_a_failing_rank_leaves_nothing_and_all_agree(monkeypatch) -> None:
    url = f"memory://{secrets.token_hex(6)}"
    real = ObjectDirectory.writer

    def failing(self, name, num_bytes):
        if name.startswith("__1"):
            raise CheckpointError(f"EIO while writing {num_bytes} bytes of {name} to {self}")
        return real(self, name, num_bytes)

    monkeypatch.setattr(ObjectDirectory, "writer", failing)

    def body(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(1000), (0, peers.rank, 3))
        dist_checkpointing.save({"w": shard}, f"{url}/iter_0000001", process_group=peers)

    for result in run_ranks(3, body):
        assert "rank 1: EIO while writing 8096 bytes of __1_0" in str(result)
    assert not objects(url)


def test_a_damaged_object_is_named(url: str) -> None:
    dist_checkpointing.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(9))}, f"{url}/iter_0000001"
    )
    for name in ("__0_0.safetensors", "manifest.json", "metadata.json", "common.json"):
        flip_last_bit(f"{url}/iter_0000001/{name}")
        template = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(9))}
        with pytest.raises(DamagedCheckpointError, match=name):
            dist_checkpointing.load(template, f"{url}/iter_0000001")
        flip_last_bit(f"{url}/iter_0000001/{name}")
    with pytest.raises(CheckpointError, match=r"missing|metadata.json"):
        dist_checkpointing.load({}, f"{url}/iter_0000002")


def test_a_tracker_that_was_set_back_wins_in_a_store_too(url: str) -> None:
    for iteration in (5, 10):
        save(url, iteration)
    time.sleep(0.05)
    storage_path(url).write(commit.TRACKER_NAME, b"5")
    assert load(url) == 5
