"""A save that is stopped anywhere costs nothing that was saved before."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import commit
from megatron.core.foundation.errors import CheckpointError
from tests.unit.dist_checkpointing.disk import Disk, Inode, Killed, fingerprint, lay_out, on_disk
from tests.unit.dist_checkpointing.runs import SAVES, load, prepare, save


@pytest.mark.parametrize("name", SAVES)
def test_a_kill_at_any_call_leaves_the_old_or_the_new_checkpoint(name: str, ram_path: Path) -> None:
    before, iteration, settings = SAVES[name]
    source = prepare(ram_path / "source", before)
    allowed = {max(before, default=None), iteration}
    stop_at, outcomes = 0, set()
    while True:
        shutil.rmtree(ram_path / "work", ignore_errors=True)
        shutil.copytree(ram_path / "source", ram_path / "work")
        directory = ram_path / "work" / source.name
        disk = Disk(ram_path / "work", stop_at=stop_at)
        try:
            with on_disk(disk):
                save(directory, iteration, **settings)
            break
        except Killed:
            stop_at += 1
        found = load(directory)
        assert found in allowed, (name, disk.log)
        outcomes.add(found)
        # The next run continues from there: it sweeps up, and saves the same iteration again.
        save(directory, iteration, **settings)
        assert load(directory) == iteration, (name, disk.log)
        assert commit.read_tracker(directory) == iteration
        listing = commit.list_checkpoints(directory)
        assert not listing.leftovers, (name, disk.log, listing.leftovers)
    assert outcomes == allowed
    calls = {entry.split()[0] for entry in disk.log}
    assert calls >= {"create", "pwrite", "write", "fsync", "rename", "unlink", "mkdir"}
    assert 25 <= stop_at <= 200


GROWING = {"create", "write", "pwrite", "mkdir", "rename"}


@pytest.mark.parametrize("name", ["a later save", "a save of the same iteration"])
@pytest.mark.parametrize(
    ("code", "calls", "lasts"),
    [
        (errno.ENOSPC, GROWING, True),
        (errno.EDQUOT, GROWING, True),
        (errno.EIO, {"write", "pwrite", "fsync"}, True),
        (errno.EIO, GROWING | {"fsync"}, False),
        (errno.EROFS, GROWING | {"fsync", "unlink", "rmdir", "ftruncate"}, True),
    ],
)
def test_a_disk_that_fails_at_any_call_keeps_the_old_or_the_new_checkpoint(
    name: str, code: int, calls: set[str], lasts: bool, ram_path: Path
) -> None:
    before, iteration, settings = SAVES[name]
    source = prepare(ram_path / "source", before)
    allowed = {max(before, default=None), iteration}
    directory, outcomes, begin = ram_path / "work" / source.name, set(), 0
    while True:
        shutil.rmtree(ram_path / "work", ignore_errors=True)
        shutil.copytree(ram_path / "source", ram_path / "work")
        disk, failed = Disk(ram_path / "work"), []

        def fail(call: str, path: str, disk=disk, begin=begin, failed=failed) -> OSError | None:
            if disk.count < begin or call not in calls or (failed and not lasts):
                return None
            failed.append(disk.count)
            return OSError(code, os.strerror(code), path)

        disk.fail = fail
        with on_disk(disk):
            try:
                save(directory, iteration, **settings)
                message = None
            except CheckpointError as error:
                message = str(error)
        found = load(directory)
        assert found in allowed
        if not failed:
            break
        if message is not None:
            assert errno.errorcode[code] in message
            assert str(directory) in message
            assert "fix:" in message
            assert "have=" in message or code not in (errno.ENOSPC, errno.EDQUOT)
            outcomes.add(found)
        # The disk is well again: the next run sweeps up, and saves.
        save(directory, iteration, **settings)
        assert load(directory) == iteration
        assert not commit.list_checkpoints(directory).leftovers
        begin = failed[0] + 1
    assert outcomes == allowed


@pytest.mark.parametrize("name", SAVES)
def test_a_power_failure_at_any_call_leaves_the_old_or_the_new_checkpoint(
    name: str, ram_path: Path
) -> None:
    before, iteration, settings = SAVES[name]
    directory = prepare(ram_path / "source", before)
    allowed = {max(before, default=None), iteration}
    states: dict[bytes, Inode] = {}

    def fail_power(disk: Disk) -> None:
        for keeps_names in (False, True):
            for keeps_half in (False, True):
                left = disk.lost_power(keeps_unsynced_names=keeps_names, keeps_half=keeps_half)
                states.setdefault(fingerprint(left), left)

    disk = Disk(ram_path / "source")
    disk.on_change = fail_power
    with on_disk(disk):
        save(directory, iteration, **settings)
    outcomes = set()
    for left in states.values():
        lay_out(left, ram_path / "after")
        found = load(ram_path / "after" / "run")
        assert found in allowed, (name, sorted(left.names["run"].names))
        outcomes.add(found)
    assert outcomes == allowed
    # Once save() has returned, no failure takes it back.
    lay_out(disk.lost_power(keeps_unsynced_names=False), ram_path / "after")
    assert load(ram_path / "after" / "run") == iteration


def test_the_disk_model_would_notice_a_missing_fsync(ram_path: Path, monkeypatch) -> None:
    """Without syncing names, a power failure after a save takes the checkpoint back."""
    directory = prepare(ram_path / "source", (5,))
    disk = Disk(ram_path / "source")
    monkeypatch.setattr(
        "megatron.core.dist_checkpointing.durable.sync_directory", lambda path: None
    )
    monkeypatch.setattr("megatron.core.dist_checkpointing.commit.sync_directory", lambda path: None)
    with on_disk(disk):
        save(directory, 10)
    lay_out(disk.lost_power(keeps_unsynced_names=False), ram_path / "after")
    assert load(ram_path / "after" / "run") == 5
