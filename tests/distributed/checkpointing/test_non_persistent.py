"""Non-persistent checkpoints: a process, a node or its files are lost, and the run continues."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.foundation.errors import CheckpointError
from tests.distributed.checkpointing.gpt_run import Layout, Model, Run
from tests.harness.distributed import run_distributed
from tests.parity.resume import CASES, words_of
from tests.parity.training_run import read_metrics, train_with_flags
from tests.unit.dist_checkpointing.test_corruption import damage

LAYOUT, MODEL = Layout(tp=2, dp=2, zero=3), Model()
SHARD = "__0_0.safetensors"


def settings_of(root: Path, rank: int, **settings: Any) -> dict[str, Any]:
    """Two nodes of two ranks, each with storage of its own."""
    return {
        "save": str(root / "shared"),
        "load": str(root / "shared"),
        "non_persistent_ckpt_type": "local",
        "non_persistent_local_ckpt_dir": str(root / f"node{rank // 2}"),
        "replication": True,
        "replication_jump": 2,
    } | settings


def train_and_stop(
    groups, root: Path, kept: int | None, non_persistent: int, total: int, settings: dict
) -> list[float]:
    """Train `total` steps; save at step `kept` for good and at `non_persistent` on the nodes."""
    run = Run(groups, LAYOUT, MODEL, **settings_of(root, torch.distributed.get_rank(), **settings))
    for step in range(1, total + 1):
        run.train(1)
        if step == kept:
            run.save()
        if step == non_persistent:
            run.checkpointer.save_non_persistent(run.train_state)
    run.checkpointer.close()
    return run.losses


def go_on(groups, root: Path, total: int, settings: dict) -> tuple[int, list[float]]:
    """Load what is there and train to step `total`; return where it began, and the losses."""
    run = Run(
        groups, LAYOUT, MODEL, seed=1, **settings_of(root, torch.distributed.get_rank(), **settings)
    )
    restored = run.load()
    begin = run.train_state.iteration if restored is not None else -1
    run.train(total - run.train_state.iteration)
    return begin, run.losses


def first_run(root: Path, **settings: Any) -> list[list[float]]:
    """Keep step 1, put step 3 on the nodes, and continue to step 5 as if nothing happened."""
    return run_distributed(train_and_stop, 4, root, 1, 3, 5, settings, tp=2)


def restart(root: Path, **settings: Any) -> tuple[int, list[list[float]]]:
    """Start again to step 5."""
    results = run_distributed(go_on, 4, root, 5, settings, tp=2)
    (begin,) = {begin for begin, _ in results}
    return begin, [losses for _, losses in results]


def lose_nothing(root: Path) -> None:
    """A process died; all files are there."""


def lose_node(root: Path) -> None:
    """The storage of node 1 is gone."""
    shutil.rmtree(root / "node1")


def lose_a_file(root: Path) -> None:
    """A shard of rank 3 has a flipped bit."""
    damage(root / "node1" / "rank_00003" / "iter_0000003" / SHARD)


def lose_during_a_save(root: Path) -> None:
    """One node has a newer iteration that the other never finished."""
    for name in ("rank_00000", "rank_00001"):
        own = root / "node0" / name
        shutil.copytree(own / "iter_0000003", own / "iter_0000004")
        os.rename(own / "iter_0000004", own / "iter_0000004.tmp-0badcafe")


def lose_both(root: Path) -> None:
    """The owner's files and the copy are gone: only the shared directory is left."""
    lose_node(root)
    shutil.rmtree(root / "node0" / "copy_of_rank_00002")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[list[float]]]:
    """The directories that a first run left, and its losses; `at_home` brings them to life."""
    home = tmp_path_factory.mktemp("non_persistent") / "home"
    losses = first_run(home)
    shutil.copytree(home, home.with_name("kept"))
    return home, losses


@pytest.fixture
def at_home(trained) -> tuple[Path, list[list[float]]]:
    """What the first run left, as it left it: a run knows its files by the save directory."""
    home, losses = trained
    shutil.rmtree(home)
    shutil.copytree(home.with_name("kept"), home)
    return home, losses


@pytest.mark.parametrize(
    ("lose", "expected"),
    [(lose_nothing, 3), (lose_node, 3), (lose_a_file, 3), (lose_during_a_save, 3), (lose_both, 1)],
)
def test_a_run_goes_on_bit_for_bit_after_a_loss(lose, expected: int, at_home) -> None:
    root, unbroken = at_home
    lose(root)
    begin, losses = restart(root)
    assert begin == expected
    per_step = len(unbroken[0]) // 5
    assert losses == [of_rank[begin * per_step :] for of_rank in unbroken]


def test_what_does_not_belong_to_the_run_is_passed_over(at_home) -> None:
    root, _ = at_home
    elsewhere = {"save": str(root / "other"), "load": str(root / "other")}
    assert restart(root, **elsewhere)[0] == -1  # another run's save directory
    alone = {"replication": False}
    results = run_distributed(go_on, 2, root, 3, alone, tp=2)  # another layout: the kept one
    assert [begin for begin, _ in results] == [1, 1]


def test_a_global_one_loads_in_any_layout_and_replaces_the_one_before(ram_path: Path) -> None:
    kind = {"non_persistent_ckpt_type": "global"}
    first_run(ram_path, **kind)
    place = ram_path / "shared" / "non_persistent"
    assert [path.name for path in place.glob("iter_*")] == ["iter_0000003"]
    assert restart(ram_path, **kind)[0] == 3
    results = run_distributed(go_on, 2, ram_path, 4, kind, tp=2)
    assert [begin for begin, _ in results] == [3, 3]
    damage(next(place.glob("iter_0000003/*.safetensors")))
    assert restart(ram_path, **kind)[0] == 1


def bad_distance(groups, root: Path) -> str:
    try:
        Run(groups, LAYOUT, MODEL, **settings_of(root, 0, replication_jump=4))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_copy_that_would_lie_with_its_owner_is_refused(ram_path: Path) -> None:
    for message in run_distributed(bad_distance, 4, ram_path, tp=2):
        assert "would be on the rank that owns it" in message
        assert "--replication-jump" in message


def test_the_flags_save_and_restart_a_run(tmp_path: Path) -> None:
    save, local, metrics = tmp_path / "save", tmp_path / "node", tmp_path / "steps.jsonl"
    case = next(case for case in CASES if case.name == "dp 2, distributed optimizer")
    words = [*words_of(case, 8), "--save", str(save), "--metrics-jsonl", str(metrics)]
    words += ["--non-persistent-save-interval", "3", "--non-persistent-ckpt-type", "local"]
    words += ["--non-persistent-local-ckpt-dir", str(local), "--replication"]
    words += ["--replication-jump", "1"]

    def train(*more: str) -> None:
        run_distributed(train_with_flags, 2, [*words, *more], timeout_s=240.0)

    train("--exit-interval", "7")  # steps 4 and 7 are kept, 3 and 6 non-persistent
    unbroken = {line["iteration"]: line["lm loss"] for line in read_metrics(metrics)}
    assert sorted(path.name for path in local.glob("*/iter_*")) == ["iter_0000006"] * 4
    shutil.rmtree(save / "iter_0000007")  # the process died in step 7, and rank 1 lost its files
    shutil.rmtree(local / "rank_00001")
    metrics.unlink()
    train("--load", str(save), "--exit-interval", "7")
    resumed = {line["iteration"]: line["lm loss"] for line in read_metrics(metrics)}
    assert resumed == {7: unbroken[7]}
