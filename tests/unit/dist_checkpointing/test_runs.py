"""Saving and loading a run: what comes back, asynchronous saves, retention, the lock."""

import os
import threading
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    async_save,
    commit,
)
from megatron.core.dist_checkpointing.async_save import NICENESS
from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.foundation.errors import CheckpointError, ConfigError
from megatron.core.parameters.rng import rng_state
from megatron.training.run.state import TrainState
from tests.harness.save_lock_holder import held_by_another_run
from tests.unit.dist_checkpointing.ranks import must_succeed, run_ranks
from tests.unit.dist_checkpointing.runs import TinyModel, checkpointer, load, save
from tests.unit.dist_checkpointing.states import one_tensor


def test_files_are_safetensors_that_the_library_opens(ram_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        str(dtype): torch.randint(0, 2, (3, 5)).to(dtype)
        for dtype in (torch.bool, torch.float64, torch.bfloat16, torch.int8, torch.float32)
    }
    state = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}
    dist_checkpointing.save(state, ram_path / "c")
    found = load_file(ram_path / "c" / "__0_0.safetensors")
    assert found.keys() == {f"{key}[0:3, 0:5]" for key in tensors}
    for key, tensor in tensors.items():
        assert torch.equal(found[f"{key}[0:3, 0:5]"], tensor)


def test_plain_values_objects_factories_and_local_values_come_back(ram_path: Path) -> None:
    def state(value: float) -> dict:
        gate_up = torch.full((4, 2), value)
        return {
            "step": value,
            "nested": {"list": [1, ShardedTensor.from_rank_offsets("l", gate_up.clone()), "x"]},
            "object": ShardedObject("object", {"value": value}),
            "local": LocalNonpersistentObject("mine"),
            "factory": ShardedTensorFactory(
                "f",
                gate_up,
                lambda key, t, replica, flat: {
                    "gate": ShardedTensor.from_rank_offsets(key + ".gate", t[:2].clone()),
                    "up": ShardedTensor.from_rank_offsets(key + ".up", t[2:].clone()),
                },
                lambda parts: torch.cat([parts["gate"], parts["up"]]),
            ),
        }

    dist_checkpointing.save(state(3.0), ram_path / "c", content_metadata={"kind": (1, 2)})
    found = dist_checkpointing.load(state(0.0), ram_path / "c")
    assert found["step"] == 3.0
    assert found["nested"]["list"][0] == 1
    assert found["nested"]["list"][2] == "x"
    assert torch.equal(found["nested"]["list"][1], torch.full((4, 2), 3.0))
    assert found["object"] == {"value": 3.0}
    assert found["local"] == "mine"
    assert torch.equal(found["factory"], torch.full((4, 2), 3.0))
    assert dist_checkpointing.load_content_metadata(ram_path / "c") == {"kind": (1, 2)}
    assert dist_checkpointing.load_common_state_dict(ram_path / "c")["step"] == 3.0
    assert dist_checkpointing.load_tensors_metadata(ram_path / "c")["l"].global_shape == (4, 2)
    assert dist_checkpointing.check_is_distributed_checkpoint(ram_path / "c")
    assert not dist_checkpointing.check_is_distributed_checkpoint(ram_path)


def test_strictness_decides_about_keys_that_differ(ram_path: Path, caplog) -> None:
    dist_checkpointing.save({"a": one_tensor("a"), "b": one_tensor("b")}, ram_path / "c")

    def template() -> dict:
        return {"a": one_tensor("a"), "x": one_tensor("x")}

    for refused in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(CheckpointError, match="not in the checkpoint: x"):
            dist_checkpointing.load(template(), ram_path / "c", strict=refused)
    with pytest.raises(CheckpointError, match="requested by no rank: b"):
        dist_checkpointing.load({"a": one_tensor("a")}, ram_path / "c", strict="raise_all")
    state, missing, unexpected = dist_checkpointing.load(
        template(), ram_path / "c", strict=StrictHandling.RETURN_ALL
    )
    assert (set(state), missing, unexpected) == ({"a"}, {"b"}, {"x"})
    assert set(dist_checkpointing.load(template(), ram_path / "c", strict="ignore_all")) == {"a"}
    dist_checkpointing.load(template(), ram_path / "c", strict="log_all")
    assert "kept as they are: x" in caplog.text
    assert "not loaded: b" in caplog.text


def test_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch_dist"):
        dist_checkpointing.save({}, "/nowhere", sharded_strategy=("torch_dist", 1))


def test_counters_seed_and_extra_come_back(ram_path: Path) -> None:
    rng_state().set_seed(77)
    train_state = TrainState(
        iteration=12,
        consumed_train_samples=100,
        consumed_valid_samples=7,
        skipped_train_samples=3,
        flops_so_far=1.5e21,
    )
    saver = checkpointer(ram_path, TinyModel(1.0))
    saver.save(train_state, extra={"loader": [1, (2, 3)]})
    torch_state = torch.get_rng_state()
    wanted = torch.rand(3)
    saver.close()
    rng_state().set_seed(1)
    restored = checkpointer(ram_path, TinyModel()).load()
    assert restored is not None
    assert restored.train_state == train_state
    assert restored.extra == {"loader": [1, (2, 3)]}
    assert restored.args == {"lr": 0.1}
    assert restored.layout["tp"] == 1
    assert rng_state().seed == 77
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert torch.equal(torch.rand(3), wanted)
    rng_state().set_seed(1234)


def test_finetuning_takes_the_weights_and_nothing_else(ram_path: Path) -> None:
    save(ram_path, 10)
    model = TinyModel()
    seed = rng_state().seed
    restored = checkpointer(ram_path, model, finetune=True).load()
    assert restored is not None
    assert restored.train_state == TrainState()
    assert model.value() == 10
    assert rng_state().seed == seed


def test_pretrained_weights_are_used_only_until_the_run_has_its_own(ram_path: Path) -> None:
    save(ram_path / "base", 10)
    model = TinyModel()
    own = str(ram_path / "own")
    both = {"load": own, "save": own, "pretrained_checkpoint": str(ram_path / "base")}
    restored = checkpointer(ram_path, model, **both).load()
    assert restored is not None
    assert (model.value(), restored.train_state.iteration) == (10, 0)
    save(ram_path / "own", 2)
    restored = checkpointer(ram_path, model, **both).load()
    assert restored is not None
    assert (model.value(), restored.train_state.iteration) == (2, 2)
    where = str(ram_path / "absent")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        checkpointer(ram_path, model, load=None, pretrained_checkpoint=where).load()


def test_an_empty_directory_starts_afresh_unless_a_checkpoint_is_demanded(ram_path, capsys) -> None:
    assert load(ram_path) is None
    assert load(ram_path / "absent") is None
    assert "starting from random weights" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="exit-on-missing-checkpoint"):
        load(ram_path, exit_on_missing_checkpoint=True)
    (ram_path / "latest").write_text("global_step5")
    (ram_path / "global_step5").mkdir()
    with pytest.raises(CheckpointError, match="DeepSpeed"):
        load(ram_path)


def test_a_path_that_is_no_checkpoint_never_leads_to_random_weights(ram_path: Path) -> None:
    (ram_path / "note.txt").write_text("not a directory")
    (ram_path / "link").symlink_to(ram_path / "gone")
    (ram_path / "base").mkdir()
    save(ram_path / "base", 3)
    refused = {
        "note.txt": "note.txt is a file",
        "note.txt/below": "note.txt is a file",
        "link": "link is a broken link",
        ".": "it contains base, link, note.txt and no checkpoint",
    }
    for name, why in refused.items():
        for way in ("load", "pretrained_checkpoint"):
            settings = {"save": None, "load": None, way: str(ram_path / name)}
            with pytest.raises(CheckpointError, match=why):
                checkpointer(ram_path, TinyModel(), **settings).load()


def test_logs_may_lie_in_the_directory_of_a_run_that_has_not_saved_yet(ram_path: Path) -> None:
    (ram_path / "tensorboard").mkdir()
    assert load(ram_path) is None
    assert load(ram_path, save=str(ram_path / "tensorboard" / "..")) is None
    (ram_path / "model_optim_rng.pt").write_text("weights of another program")
    with pytest.raises(CheckpointError, match="it contains model_optim_rng.pt and no checkpoint"):
        load(ram_path)


def test_a_checkpoint_can_be_named_itself(ram_path: Path) -> None:
    save(ram_path, 10)
    assert load(ram_path / "iter_0000010") == 10


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"save_retain_interval": 20}, [40, 20]),
        ({"most_recent_k": 3}, [40, 35, 30]),
        ({"save_retain_interval": 20, "most_recent_k": 2}, [40, 35, 20]),
        ({}, [40, 35, 30, 25, 20, 10]),
    ],
)
def test_retention_keeps_the_newest_and_what_its_rules_name(ram_path: Path, rule, kept) -> None:
    for iteration in (10, 20, 25, 30, 35, 40):
        save(ram_path, iteration, **rule)
    assert [f.iteration for f in commit.list_checkpoints(ram_path).checkpoints] == kept


def test_retention_deletes_nothing_when_the_new_checkpoint_reads_back_damaged(
    ram_path: Path, monkeypatch
) -> None:
    save(ram_path, 5)
    from megatron.core.dist_checkpointing import writer

    honest = writer.write_at

    def lossy(descriptor: int, data, position: int) -> None:
        data = bytearray(data)
        data[-1] ^= 1
        honest(descriptor, memoryview(data), position)

    monkeypatch.setattr(writer, "write_at", lossy)
    with pytest.raises(CheckpointError, match="is corrupt"):
        save(ram_path, 10, save_retain_interval=100)
    assert load(ram_path) == 5


def test_an_asynchronous_save_keeps_the_state_of_its_moment(ram_path: Path) -> None:
    model = TinyModel(1.0)
    saver = checkpointer(ram_path, model, async_save=True)
    saver.save(TrainState(iteration=1, consumed_train_samples=4))
    model.fill(99.0)
    assert saver.has_save_in_flight
    while saver.has_save_in_flight:
        saver.after_step()
    assert load(ram_path) == 1
    model.fill(2.0)
    saver.save(TrainState(iteration=2, consumed_train_samples=8))
    model.fill(3.0)
    saver.save(TrainState(iteration=3, consumed_train_samples=12))  # waits for the one in flight
    assert load(ram_path) == 2
    saver.close()
    assert load(ram_path) == 3


def test_one_slot_holds_the_save_in_flight_whoever_commits_it(ram_path: Path) -> None:
    from megatron.training.checkpointing import maybe_finalize_async_save

    first, second = (checkpointer(ram_path, TinyModel(1.0), async_save=True) for _ in range(2))
    first.save(TrainState(iteration=1, consumed_train_samples=4))
    assert second.has_save_in_flight
    maybe_finalize_async_save(blocking=True)
    assert not first.has_save_in_flight
    assert (first.last_committed, second.last_committed) == (1, None)
    assert load(ram_path) == 1
    first.close()


def test_saved_is_said_only_after_the_commit_and_nothing_is_visible_before(
    ram_path: Path, capsys, monkeypatch
) -> None:
    from megatron.core.dist_checkpointing import writer as writer_module

    may_write, niceness = threading.Event(), []
    honest = writer_module.write_shards

    def slow(*args, **options):
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        may_write.wait(20)
        return honest(*args, **options)

    monkeypatch.setattr(writer_module, "write_shards", slow)
    saver = checkpointer(ram_path, TinyModel(1.0), async_save=True)
    saver.save(TrainState(iteration=1, consumed_train_samples=4))
    saver.after_step()
    assert saver.has_save_in_flight
    assert load(ram_path) is None
    assert "successfully saved" not in capsys.readouterr().out
    may_write.set()
    saver.close()
    assert load(ram_path) == 1
    assert "successfully saved" in capsys.readouterr().out
    # The writer gives way to training; the other threads are as they were.
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert niceness == [min(19, mine + NICENESS)]


def test_an_error_of_the_background_writer_surfaces_at_a_step(ram_path: Path, monkeypatch) -> None:
    from megatron.core.dist_checkpointing import writer as writer_module

    def full(*args, **options):
        raise CheckpointError("ENOSPC while writing")

    saver = checkpointer(ram_path, TinyModel(1.0), async_save=True)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_shards", full)
        saver.save(TrainState(iteration=1))

        def steps() -> None:
            while saver.has_save_in_flight:
                saver.after_step()

        with pytest.raises(CheckpointError, match="ENOSPC"):
            steps()
    assert not saver.has_save_in_flight
    assert not list(ram_path.glob("iter_*"))
    saver.save(TrainState(iteration=2, consumed_train_samples=8))
    saver.close()


def test_the_snapshot_buffer_does_not_grow_from_save_to_save(ram_path: Path) -> None:
    saver = checkpointer(ram_path, TinyModel(1.0), async_save=True)
    for iteration in range(1, 11):
        saver.save(TrainState(iteration=iteration))
        saver.finish()
        if iteration == 1:
            size = async_save._BUFFER.num_bytes
    saver.close()
    assert async_save._BUFFER.num_bytes == size


def test_ranks_commit_an_asynchronous_save_together(ram_path: Path) -> None:
    # One process holds one asynchronous save; the protocol of many ranks runs on gloo elsewhere.
    def body(peers):
        shard = ShardedTensor.from_rank_offsets("w", torch.ones(2) * peers.rank, (0, peers.rank, 2))
        from megatron.core.dist_checkpointing.save_in_progress import prepare_save

        saving = prepare_save({"w": shard}, ram_path / "c", peers=peers)
        handle = async_save.AsyncSave(saving)
        handle._thread.start()
        while not handle.try_finish():
            pass

    must_succeed(run_ranks(2, body))
    found = dist_checkpointing.load_plain_tensors(ram_path / "c")["w"]
    assert found.tolist() == [0, 0, 1, 1]


def test_a_second_run_in_a_directory_is_refused_until_the_first_is_gone(ram_path: Path) -> None:
    with (
        held_by_another_run(ram_path),
        pytest.raises(CheckpointError, match=r'another run is saving.*"pid": \d+'),
    ):
        SaveLock.acquire(ram_path, grace_s=0.2)
    lock = SaveLock.acquire(ram_path)
    assert SaveLock.acquire(ram_path) is lock
    lock.release()
