"""What is in a save directory beside a run's checkpoints, and random state that is none."""

import shutil
from pathlib import Path

import pytest

from megatron.core.foundation.errors import CheckpointError
from megatron.training.checkpointing.run_state import apply_rng
from megatron.training.checkpointing.selection import select_checkpoints
from megatron.training.run.state import TrainState
from tests.unit.dist_checkpointing.runs import TinyModel, checkpointer, load, save


def test_retention_deletes_only_checkpoints_of_runs(ram_path: Path) -> None:
    save(ram_path, 5)
    for name, content in (("iter_0000001", None), ("iter_0000002", "thesis.txt")):
        (ram_path / name).mkdir()
        if content:
            (ram_path / name / content).write_text("mine")
    shutil.copytree(ram_path / "iter_0000005", ram_path / "iter_0000003")
    for iteration in (6, 7):
        save(ram_path, iteration, most_recent_k=1)
    there = sorted(path.name for path in ram_path.iterdir() if path.name.startswith("iter_"))
    # A copy under another name is no checkpoint either.
    assert there == ["iter_0000001", "iter_0000002", "iter_0000003", "iter_0000007"]


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "holds nothing"), (b"abc", "holds 'abc'"), (b"\0\0", "not a number"),
     (b"\xff", "text"), (b"9" * 100, "bytes"), (b"10; rm -rf /", "holds '10;")],
)  # fmt: skip
def test_a_tracker_that_cannot_be_read_is_told(content: bytes, why: str, ram_path: Path) -> None:
    save(ram_path, 5)
    (ram_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    notes = select_checkpoints(ram_path, None).notes
    assert any("cannot be used" in note and why in note for note in notes)
    assert load(ram_path) == 5


def test_a_directory_in_the_place_of_the_tracker_is_told(ram_path: Path) -> None:
    save(ram_path, 5)
    tracker = ram_path / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    assert select_checkpoints(ram_path, None).notes == []
    tracker.mkdir()
    assert any("cannot be used" in note for note in select_checkpoints(ram_path, None).notes)
    assert load(ram_path) == 5


def test_a_stray_file_of_another_format_hides_no_checkpoint(ram_path: Path) -> None:
    save(ram_path, 5)
    (ram_path / ".metadata").write_bytes(b"x")
    assert load(ram_path) == 5


@pytest.mark.parametrize(
    "state",
    [{"generators": b"blob"}, {"generators": {"python": 3}}, {"rng_state": {"seed": "x"}},
     {"rng_state": [1]}],
)  # fmt: skip
def test_a_random_state_that_is_none_is_a_message(state) -> None:
    with pytest.raises(CheckpointError, match="--no-load-rng"):
        apply_rng(state)


def test_a_save_directory_that_is_moved_away_is_not_made_anew(ram_path: Path) -> None:
    directory = ram_path / "run"
    saver = checkpointer(directory, TinyModel(3.0))
    saver.save(TrainState(iteration=1))
    directory.rename(ram_path / "moved")
    with pytest.raises(CheckpointError, match="does not exist any more"):
        saver.save(TrainState(iteration=2))
    assert not directory.exists()
    (ram_path / "moved").rename(directory)
    saver.save(TrainState(iteration=3, consumed_train_samples=12))
    saver.close()
    assert load(directory) == 3
