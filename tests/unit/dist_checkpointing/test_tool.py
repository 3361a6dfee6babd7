"""tools/checkpoint: what it prints and how it exits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.dist_checkpointing.runs import TinyModel, checkpointer, save
from tests.unit.dist_checkpointing.test_corruption import damage


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
    for words in ("iter_0000005", "tracker says 10", "iteration: 10", "'tp': 1", "first.weight",
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
