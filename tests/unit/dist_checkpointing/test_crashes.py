"""A save that is stopped anywhere costs nothing that was saved before."""

import shutil
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import commit
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
