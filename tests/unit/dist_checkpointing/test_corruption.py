"""A checkpoint that is not what was saved is refused, and the file is named."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, commit
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from megatron.training.run.state import TrainState
from tests.unit.dist_checkpointing.ranks import must_succeed, run_ranks
from tests.unit.dist_checkpointing.runs import TinyModel, checkpointer, load, save

FILES = ("__0_0.safetensors", "__1_0.safetensors", "common.json", "manifest.json", "metadata.json")

NUM_FLIPS = 150


def state(rank: int, seed: float = 0.0) -> dict:
    """A sharded matrix, a bf16 vector on rank 0, and plain values."""
    whole = torch.arange(64.0).view(8, 8) + seed
    shards = {"w": ShardedTensor.from_rank_offsets("w", whole.chunk(2)[rank].clone(), (0, rank, 2))}
    if rank == 0:
        vector = torch.arange(5).bfloat16() + seed
        shards["v"] = ShardedTensor.from_rank_offsets("v", vector)
    return {"tensors": shards, "step": 10, "name": "run", "seed": seed}


def write(directory: Path, seed: float = 0.0) -> Path:
    """Save from two ranks and return the checkpoint."""
    must_succeed(
        run_ranks(
            2,
            lambda peers: dist_checkpointing.save(
                state(peers.rank, seed), directory, process_group=peers
            ),
        )
    )
    return directory


def read_all(directory: Path) -> dict:
    """Load everything in one process."""
    into = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(8, 8)),
        "v": ShardedTensor.from_rank_offsets("v", torch.zeros(5, dtype=torch.bfloat16)),
    }
    return dist_checkpointing.load(into, directory)


def assert_refused(directory: Path, name: str) -> None:
    """Loading and verifying both refuse, and name the file."""
    with pytest.raises(DamagedCheckpointError, match="is damaged|is corrupt|is missing|bytes") as e:
        read_all(directory)
    assert name in str(e.value), str(e.value)
    problems = verify_checkpoint(directory).problems
    assert problems
    assert any(name in str(problem) for problem in problems)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_of_any_file_is_refused_and_the_file_named(
    name: str, ram_path: Path
) -> None:
    path = write(ram_path / "iter_0000010")
    original = (path / name).read_bytes()
    rng = random.Random(name)
    # One digest covers a file, so where the byte lies makes no difference beyond its ends.
    drawn = rng.sample(range(len(original)), min(NUM_FLIPS, len(original)))
    for position in {0, *drawn, len(original) - 1}:
        changed = bytearray(original)
        changed[position] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(changed)
        with pytest.raises(DamagedCheckpointError) as error:
            read_all(path)
        # A flip in metadata.json may point at the manifest, which then no longer matches it.
        assert name in str(error.value) or name == "metadata.json", str(error.value)
        assert str(path) in str(error.value)
    (path / name).write_bytes(original)
    read_all(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_lengthened_emptied_or_removed_is_refused(name: str, ram_path: Path) -> None:
    path = write(ram_path / "iter_0000010")
    original = (path / name).read_bytes()
    for damaged in (b"", original[:-1], original[: len(original) // 2], original + b"\0"):
        (path / name).write_bytes(damaged)
        assert_refused(path, name)
    (path / name).unlink()
    assert_refused(path, name)


def test_swapped_and_transplanted_files_are_refused(ram_path: Path) -> None:
    path = write(ram_path / "iter_0000010")
    write(ram_path / "iter_0000020", seed=1.0)
    for name in FILES:
        shutil.copytree(path, ram_path / "copy" / "iter_0000010")
        (ram_path / "copy" / "iter_0000010" / name).write_bytes(
            (ram_path / "iter_0000020" / name).read_bytes()
        )
        with pytest.raises(DamagedCheckpointError):
            read_all(ram_path / "copy" / "iter_0000010")
        shutil.rmtree(ram_path / "copy")
    other = path / "swap"
    (path / FILES[0]).rename(other)
    (path / FILES[1]).rename(path / FILES[0])
    other.rename(path / FILES[1])
    with pytest.raises(DamagedCheckpointError):
        read_all(path)


def test_a_checkpoint_under_the_name_of_another_iteration_is_refused(ram_path: Path) -> None:
    write(ram_path / "iter_0000010")
    (ram_path / "iter_0000010").rename(ram_path / "iter_0000020")
    with pytest.raises(DamagedCheckpointError, match="saved as iter_0000010"):
        read_all(ram_path / "iter_0000020")
    (ram_path / "iter_0000020").rename(ram_path / "my_best_model")
    read_all(ram_path / "my_best_model")


def test_files_that_are_not_listed_are_not_opened_and_are_reported(ram_path: Path) -> None:
    path = write(ram_path / "iter_0000010")
    os.mkfifo(path / "common.pt")
    (path / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    read_all(path)
    assert verify_checkpoint(path).unlisted == [".metadata", "common.pt"]


def test_damage_found_by_one_rank_is_one_decision_of_all(ram_path: Path) -> None:
    path = write(ram_path / "iter_0000010")
    data = bytearray((path / "__1_0.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "__1_0.safetensors").write_bytes(data)
    results = run_ranks(
        2,
        lambda peers: dist_checkpointing.load(
            {"w": state(peers.rank)["tensors"]["w"]}, path, process_group=peers
        ),
    )
    assert all(isinstance(result, DamagedCheckpointError) for result in results)
    assert "rank 1" in str(results[0])
    assert all("__1_0.safetensors" in str(result) for result in results)


def damage(path: Path) -> None:
    """Flip the last bit of a shard file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_intact_checkpoint_wins_and_the_decision_is_printed(
    ram_path: Path, capsys
) -> None:
    for iteration in (5, 10, 15):
        save(ram_path, iteration)
    damage(ram_path / "iter_0000015" / "__0_0.safetensors")
    (ram_path / "iter_0000010" / "manifest.json").unlink()
    assert load(ram_path) == 5
    said = capsys.readouterr().out
    assert "iter_0000015" in said
    assert "__0_0.safetensors is corrupt" in said
    assert "manifest.json is missing" in said
    assert "newer ones are damaged" in said


def test_no_intact_checkpoint_is_an_error_and_never_a_random_model(ram_path: Path) -> None:
    save(ram_path, 5)
    damage(ram_path / "iter_0000005" / "__0_0.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is intact"):
        load(ram_path)
    shutil.rmtree(ram_path / "iter_0000005")
    with pytest.raises(CheckpointError, match="names 5, but there is no checkpoint"):
        load(ram_path)


def test_a_tracker_that_names_no_checkpoint_is_only_a_hint(ram_path: Path) -> None:
    for iteration in (5, 10):
        save(ram_path, iteration)
    tracker = ram_path / commit.TRACKER_NAME
    for text in (b"999", b"release"):
        tracker.write_bytes(text)
        assert load(ram_path) == 10
    tracker.unlink()
    assert load(ram_path) == 10


def set_back(directory: Path, text: str) -> None:
    """Write the tracker as a person does, some time after the last save."""
    for checkpoint in directory.glob("iter_*"):
        for path in (*checkpoint.iterdir(), checkpoint):
            os.utime(path, ns=(1, path.stat().st_mtime_ns - 10**9))
    (directory / commit.TRACKER_NAME).write_text(text)


def test_a_tracker_that_a_person_has_set_back_wins_and_a_line_says_so(
    ram_path: Path, capsys
) -> None:
    for iteration in (5, 10, 15):
        save(ram_path, iteration)
    set_back(ram_path, "10\n")
    assert load(ram_path) == 10
    told = capsys.readouterr().out
    assert "names 10, and was set after iter_0000015 was saved: loading iter_0000010" in told
    # Where the named one is damaged, older ones take its place, never one that was left behind.
    damage(ram_path / "iter_0000010" / "__0_0.safetensors")
    assert load(ram_path) == 5
    damage(ram_path / "iter_0000005" / "__0_0.safetensors")
    with pytest.raises(CheckpointError, match="is intact"):
        load(ram_path)


def test_a_run_that_was_set_back_leaves_its_non_persistent_checkpoint_alone(ram_path: Path) -> None:
    kind = {"non_persistent_ckpt_type": "global"}
    for iteration in (5, 10):
        save(ram_path, iteration)
    saver = checkpointer(ram_path, TinyModel(12.0), **kind)
    saver.save_non_persistent(TrainState(iteration=12, consumed_train_samples=48))
    saver.close()
    assert load(ram_path, **kind) == 12
    set_back(ram_path, "5")
    assert load(ram_path, **kind) == 5


def test_a_run_that_was_set_back_resumes_from_what_it_has_saved_since(ram_path: Path) -> None:
    for iteration in (5, 10):
        save(ram_path, iteration)
    set_back(ram_path, "5")
    save(ram_path, 7)
    assert load(ram_path) == 7
    # A crash before the tracker is written: the checkpoint that was saved after it counts.
    (ram_path / commit.TRACKER_NAME).write_text("5")
    os.utime(ram_path / commit.TRACKER_NAME, ns=(1, manifest_time(ram_path / "iter_0000007") - 1))
    os.utime(ram_path / "iter_0000010" / "manifest.json", ns=(1, 1))
    assert load(ram_path) == 7


def test_a_checkpoint_that_was_saved_after_the_tracker_is_loaded(ram_path: Path, capsys) -> None:
    for iteration in (5, 10):
        save(ram_path, iteration)
    tracker = ram_path / commit.TRACKER_NAME
    tracker.write_text("5")
    os.utime(tracker, ns=(1, manifest_time(ram_path / "iter_0000010") - 1))
    assert load(ram_path) == 10
    assert "names 5, but iter_0000010 was saved after it" in capsys.readouterr().out


def manifest_time(checkpoint: Path) -> int:
    return (checkpoint / "manifest.json").stat().st_mtime_ns


def test_a_named_step_is_loaded_or_refused_and_nothing_else_is_tried(ram_path: Path) -> None:
    for iteration in (5, 10):
        save(ram_path, iteration)
    assert load(ram_path, ckpt_step=5) == 5
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 7; it has: 10, 5"):
        load(ram_path, ckpt_step=7)
    damage(ram_path / "iter_0000005" / "__0_0.safetensors")
    with pytest.raises(CheckpointError, match="is intact"):
        load(ram_path, ckpt_step=5)
