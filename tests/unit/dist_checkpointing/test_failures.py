"""Storage that refuses: earlier checkpoints intact, all ranks agree, the message helps."""

import errno
import os
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, commit
from megatron.core.foundation.errors import CheckpointError
from tests.unit.dist_checkpointing.disk import Disk, on_disk
from tests.unit.dist_checkpointing.ranks import run_ranks
from tests.unit.dist_checkpointing.runs import load, save
from tests.unit.dist_checkpointing.states import one_tensor


def error_on(call: str, part: str, code: int):
    """Fail `call` on paths that contain `part`."""

    def fail(name: str, path: str) -> OSError | None:
        if name == call and part in os.path.basename(path):
            return OSError(code, os.strerror(code), path)
        return None

    return fail


def test_a_tracker_that_cannot_be_written_is_an_error_after_the_commit(ram_path: Path) -> None:
    save(ram_path, 5)
    disk = Disk(ram_path)
    disk.fail = error_on("rename", "latest_checkpointed_iteration.txt.tmp", errno.EIO)
    with on_disk(disk), pytest.raises(CheckpointError, match="EIO while writing .*latest_"):
        save(ram_path, 10)
    assert load(ram_path) == 10


def test_a_failure_of_one_rank_is_the_failure_of_all_and_leaves_no_trace(ram_path: Path) -> None:
    disk = Disk(ram_path)
    disk.fail = error_on("pwrite", "__1_0.safetensors", errno.ENOSPC)

    def body(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(1000), (0, peers.rank, 3))
        dist_checkpointing.save({"w": shard}, ram_path / "c", process_group=peers)

    with on_disk(disk):
        results = run_ranks(3, body)
    assert all(isinstance(result, CheckpointError) for result in results)
    for rank in (0, 2):
        assert "rank 1" in str(results[rank])
        assert "__1_0.safetensors: No space left on device: need=" in str(results[rank])
    assert not list(ram_path.iterdir())


def test_a_full_disk_is_noticed_before_anything_is_written(ram_path: Path, monkeypatch) -> None:
    save(ram_path, 5)
    monkeypatch.setattr("megatron.core.dist_checkpointing.writer.free_bytes", lambda path: 100)
    with pytest.raises(CheckpointError, match=r"ENOSPC before writing .*need=\d+ bytes have=100"):
        save(ram_path, 10)
    assert load(ram_path) == 5
    assert not commit.list_checkpoints(ram_path).leftovers


def test_a_rank_that_does_not_see_the_directory_says_so(ram_path: Path, monkeypatch) -> None:
    from megatron.core.dist_checkpointing.save_in_progress import prepare_save

    def body(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, peers.rank, 2))
        saving = prepare_save({"w": shard}, ram_path / "c", peers=peers)
        if peers.rank == 1:
            saving.writer.staging = ram_path / "mounted_elsewhere" / "c.tmp"
        saving.write()
        saving.finish()

    results = run_ranks(2, body)
    for result in results:
        assert "ENOENT while writing" in str(result)
        assert "all ranks need one shared directory" in str(result)


def test_state_that_is_not_plain_is_refused_by_name_on_every_rank(ram_path: Path) -> None:
    def body(peers):
        state = {"w": one_tensor(replica_id=peers.rank), "args": {"callback": print}}
        dist_checkpointing.save(state, ram_path / "c", process_group=peers)

    for result in run_ranks(2, body):
        assert isinstance(result, CheckpointError)
        assert "state.args.callback is a builtins.builtin_function_or_method" in str(result)
    assert not list(ram_path.iterdir())


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"w": one_tensor("v")}, "not in the checkpoint: v. The nearest stored key is 'w'"),
        ({"w": one_tensor(data=torch.zeros(3, 5))}, r"global shape \(3, 4\); this run needs"),
        ({"w": one_tensor(data=torch.zeros(12))}, r"global shape \(3, 4\); this run needs"),
        (
            {"w": one_tensor(data=torch.zeros(3, 4, dtype=torch.int32))},
            "stored as torch.float32; this run needs torch.int32",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_both_sides_named(
    template: dict, words: str, ram_path: Path
) -> None:
    key = "a_tensor_key" if "nearest" in words else "w"
    if "nearest" in words:
        template, words = (
            {"w": one_tensor("a_tensor_kez")},
            "not in the checkpoint: a_tensor_kez. The nearest stored key is 'a_tensor_key'",
        )
    dist_checkpointing.save({"w": one_tensor(key)}, ram_path / "c")
    with pytest.raises(CheckpointError, match=words):
        dist_checkpointing.load(template, ram_path / "c")


def test_a_mismatch_does_not_fall_back_to_an_older_checkpoint(ram_path: Path) -> None:
    from torch import nn

    from tests.unit.dist_checkpointing.runs import checkpointer

    for iteration in (5, 10):
        save(ram_path, iteration)
    with pytest.raises(CheckpointError, match=r"stored|not in the checkpoint") as error:
        checkpointer(ram_path, nn.Linear(4, 7)).load()
    assert "is intact" not in str(error.value)
