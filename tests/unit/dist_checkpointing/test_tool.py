"""tools/checkpoint: what it prints and how it exits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, commit
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from tests.unit.dist_checkpointing.ranks import must_succeed, run_ranks
from tests.unit.dist_checkpointing.runs import TinyModel, checkpointer, save
from tests.unit.dist_checkpointing.states import one_tensor
from tests.unit.dist_checkpointing.test_corruption import damage, set_back
from tools.checkpoint.state_digest import checkpoint_digest


@pytest.fixture(scope="module")
def tool():
    """The entry point as a module."""
    from tools.checkpoint import __main__

    return __main__


def test_inspect_shows_layout_sizes_and_tensors(tool, ram_path: Path, capsys) -> None:
    save(ram_path, 5)
    save(ram_path, 10)
    assert tool.main(["inspect", str(ram_path), "--tensors", "--args"]) == 0
    said = capsys.readouterr().out
    for words in ("iter_0000005", "tracker names 10", "iteration: 10", "'tp': 1", "first.weight",
                  "3x4", "BF16", "lr = 0.1"):  # fmt: skip
        assert words in said


def test_verify_exits_with_1_and_names_the_damaged_file(tool, ram_path: Path, capsys) -> None:
    save(ram_path, 5)
    save(ram_path, 10)
    assert tool.main(["verify", str(ram_path), "--all"]) == 0
    damage(ram_path / "iter_0000005" / "__0_0.safetensors")
    assert tool.main(["verify", str(ram_path)]) == 0
    assert tool.main(["verify", str(ram_path), "--all"]) == 1
    said = capsys.readouterr().out
    assert "iter_0000005/__0_0.safetensors is corrupt" in said
    assert "iter_0000005: DAMAGED" in said


def test_digest_is_of_the_state_and_diff_tells_what_changed(tool, ram_path: Path, capsys) -> None:
    for name, value in (("a", 5), ("b", 5), ("c", 6)):
        save(ram_path / name, value)
    digests = {}
    capsys.readouterr()
    for name in "abc":
        assert tool.main(["digest", str(ram_path / name), "--weights"]) == 0
        digests[name] = capsys.readouterr().out.split()[0]
    assert digests["a"] == digests["b"] != digests["c"]
    assert tool.main(["diff", str(ram_path / "a"), str(ram_path / "b"), "--contents"]) == 0
    assert tool.main(["diff", str(ram_path / "a"), str(ram_path / "c"), "--contents"]) == 1
    assert "first.weight: contents differ" in capsys.readouterr().out


def test_the_data_of_a_run_are_shown_and_compared(tool, ram_path: Path, capsys) -> None:
    for name, corpus in (("a", "0f"), ("b", "9c")):
        order = {"seed": 3, "members": [{"corpus": "77"}, {"corpus": corpus}], "weights": [1, 2]}
        state = {"w": one_tensor("w"), "iteration": 1, "data_order": order}
        dist_checkpointing.save(state, ram_path / name / "iter_0000001")
    assert tool.main(["inspect", str(ram_path / "b")]) == 0
    assert "data.members[1].corpus: 9c" in capsys.readouterr().out
    assert tool.main(["diff", str(ram_path / "a"), str(ram_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "data.members[1].corpus: '0f' -> '9c'",
        "1 differences",
    ]


def test_reshard_changes_files_and_not_the_state(tool, ram_path: Path, capsys) -> None:
    three = run_ranks(
        3,
        lambda peers: dist_checkpointing.save(
            {"w": ShardedTensor.from_rank_offsets(
                "w", torch.full((2, 5), float(peers.rank)), (0, peers.rank, 3)),
             "b": one_tensor("b", replica_id=peers.rank),
             "optimizer.m": one_tensor("optimizer.m", replica_id=peers.rank),
             "iteration": 7},
            ram_path / "in" / "iter_0000007",
            process_group=peers,
        ),
    )  # fmt: skip
    must_succeed(three)
    out = ram_path / "out" / "iter_0000007"
    for files, expected in ((1, 1), (2, 2), (9, 3)):
        assert tool.main(["reshard", str(ram_path / "in"), str(out.parent), "--files",
                          str(files)]) == 0  # fmt: skip
        assert len(list(out.glob("*.safetensors"))) == expected
        assert checkpoint_digest(out) == checkpoint_digest(ram_path / "in" / "iter_0000007")
        assert not verify_checkpoint(out).problems
    assert commit.read_tracker(out.parent) == 7
    assert tool.main(["reshard", str(ram_path / "in"), str(ram_path / "w"), "--weights"]) == 0
    found = dist_checkpointing.load_plain_tensors(ram_path / "w" / "iter_0000007")
    assert found.keys() == {"w", "b"}
    assert found["w"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    damage(ram_path / "in" / "iter_0000007" / "__1_0.safetensors")
    assert tool.main(["reshard", str(ram_path / "in"), str(ram_path / "x")]) == 1
    assert "is corrupt" in capsys.readouterr().err
    assert not list((ram_path / "x").glob("iter*"))


def test_average_is_the_weighted_mean_and_loads_as_a_start(tool, ram_path: Path, capsys) -> None:
    for name, value in (("a", 1), ("b", 4)):
        save(ram_path / name, value)
    sources = [str(ram_path / "a"), str(ram_path / "b")]
    for factors, expected in (([], 2.5), (["--factors", "2", "1"], 2.0)):
        assert tool.main(["average", str(ram_path / "out"), *sources, *factors]) == 0
        model = TinyModel(-1.0)
        settings = {"save": None, "load": None, "pretrained_checkpoint": str(ram_path / "out")}
        restored = checkpointer(ram_path, model, **settings).load()
        assert model.value() == expected
        assert restored is not None
        assert restored.train_state.iteration == 0
        assert restored.args["lr"] == 0.1
    dist_checkpointing.save(
        {"first.weight": one_tensor("first.weight")}, ram_path / "c/iter_0000001"
    )
    assert tool.main(["average", str(ram_path / "out"), *sources, str(ram_path / "c")]) == 1
    assert tool.main(["average", str(ram_path / "out"), *sources, "--factors", "1"]) == 1
    said = capsys.readouterr().err
    assert "is of another model than" in said
    assert "1 factors for 2 checkpoints" in said


def test_prune_keeps_what_the_rule_keeps_and_deletes_nothing_for_a_damaged_one(
    tool, ram_path: Path, capsys
) -> None:
    for iteration in (2, 4, 5, 6, 9):
        save(ram_path, iteration)
    words = ["prune", str(ram_path), "--keep-last", "2", "--keep-every", "4"]

    def names() -> list[int]:
        return sorted(f.iteration for f in commit.list_checkpoints(ram_path).checkpoints)

    assert tool.main(words) == 0
    assert "nothing was deleted" in capsys.readouterr().out
    assert names() == [2, 4, 5, 6, 9]
    newest = ram_path / "iter_0000009" / "__0_0.safetensors"
    intact = newest.read_bytes()
    damage(newest)
    assert tool.main([*words, "--yes"]) == 1
    assert names() == [2, 4, 5, 6, 9]
    newest.write_bytes(intact)
    assert tool.main([*words, "--yes"]) == 0
    assert names() == [4, 6, 9]
    assert tool.main(["prune", str(ram_path), "--keep-last", "0"]) == 1


def test_the_tools_take_and_keep_the_one_that_a_person_has_set_back_to(
    tool, ram_path: Path, capsys
) -> None:
    for iteration in (5, 10, 15):
        save(ram_path, iteration)
    set_back(ram_path, "5")
    digests = {}
    capsys.readouterr()
    for name in (".", "iter_0000005"):
        assert tool.main(["digest", str(ram_path / name)]) == 0
        digests[name] = capsys.readouterr().out.split()[0]
    assert digests["."] == digests["iter_0000005"]
    assert tool.main(["prune", str(ram_path), "--yes"]) == 0
    there = sorted(path.name for path in ram_path.glob("iter_*"))
    assert there == ["iter_0000005", "iter_0000015"]


def test_it_runs_as_a_script_from_any_directory(ram_path: Path) -> None:
    save(ram_path, 5)
    script = Path(__file__).resolve().parents[3] / "tools/checkpoint"
    found = subprocess.run(
        [sys.executable, str(script), "verify", "."], cwd=ram_path, text=True, capture_output=True
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "intact" in found.stdout


def test_a_missing_checkpoint_is_a_message_not_a_traceback(tool, ram_path: Path, capsys) -> None:
    assert tool.main(["inspect", str(ram_path)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err


def test_megatrons_functions_save_and_load_by_args(ram_path: Path) -> None:
    from argparse import Namespace

    from megatron.training.checkpointing import (
        load_args_from_checkpoint,
        load_checkpoint,
        maybe_finalize_async_save,
        save_checkpoint,
    )

    where = str(ram_path)
    args = Namespace(save=where, load=where, num_layers=3, lr=0.5, consumed_train_samples=40,
                     consumed_valid_samples=8, async_save=True)  # fmt: skip
    save_checkpoint(10, [TinyModel(2.0)], None, None, 1e15, args=args)
    maybe_finalize_async_save(blocking=True)
    model, other = TinyModel(), Namespace(save=where, load=where, num_layers=9, lr=0.1)
    assert load_checkpoint([model], None, None, args=other) == (10, 1e15)
    assert model.value() == 2.0
    assert (other.consumed_train_samples, other.consumed_valid_samples) == (40, 8)
    merged, stored = load_args_from_checkpoint(other)
    assert (merged.num_layers, merged.lr) == (3, 0.1)
    assert stored is not None
    assert stored.lr == 0.5
    assert load_args_from_checkpoint(Namespace(load=str(ram_path / "absent")))[1] is None
    checkpointer(ram_path, model).close()
    args.non_persistent_ckpt_type = other.non_persistent_ckpt_type = "local"
    args.non_persistent_local_ckpt_dir = other.non_persistent_local_ckpt_dir = f"{where}/node"
    save_checkpoint(12, [TinyModel(3.0)], None, None, 2e15, non_persistent_ckpt=True, args=args)
    assert load_checkpoint([model], None, None, args=other) == (12, 2e15)
    assert model.value() == 3.0
