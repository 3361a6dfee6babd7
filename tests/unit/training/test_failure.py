"""A failed run says one final line, leaves failure.json, and exits with the code of its class."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    NumericsError,
    TopologyError,
    raise_together,
)
from megatron.training.resilience.failure import classify, failures_reported
from megatron.training.resilience.progress import RunProgress

FATAL = re.compile(
    r"^FATAL\[(?P<kind>\w+)\] iter=(?P<iter>\d+) rank=(?P<rank>\d+) host=\S+ where=(?P<where>.+)"
    r" last_good_ckpt=(?P<last>\w+) action=(?P<action>.+)$",
    re.MULTILINE,
)


def fail(error: BaseException, progress: RunProgress, store=None) -> int:
    """Run the reporting around a body that raises; return the exit code."""
    with (
        pytest.raises(SystemExit) as caught,
        failures_reported(progress, [store] if store is not None else []),
    ):
        raise error
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ConfigError("x"), "CONFIG", 10),
        (DataError("x"), "DATA", 11),
        (CheckpointError("x"), "CHECKPOINT", 12),
        (TopologyError("x"), "TOPOLOGY", 13),
        (NumericsError("x"), "NONFINITE", 14),
        (MissingExtraError("x"), "MISSING_LIBRARY", 15),
        (MemoryError(), "OOM", 16),
        (torch.OutOfMemoryError("CUDA out of memory"), "OOM", 16),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "OOM", 16),
        (RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1"), "PEER_LOST", 17),
        (KeyboardInterrupt(), "INTERRUPTED", 130),
        (ZeroDivisionError("x"), "CRASH", 1),
    ],
)
def test_every_failure_has_a_class_and_an_exit_code(error, kind, code, capsys):
    assert classify(error) == (kind, code)
    assert fail(error, RunProgress(rank=3, iteration=7, where="training")) == code
    lines = capsys.readouterr().err.strip().splitlines()
    found = FATAL.match(lines[-1])
    assert found is not None
    assert (found["kind"], found["iter"], found["rank"]) == (kind, "7", "3")
    assert (found["where"], found["last"]) == ("training", "none")
    assert found["action"]


def test_a_users_error_has_no_traceback(capsys):
    fail(DataError("the file is gone.", fix="bring it back"), RunProgress())
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "the file is gone." in err
    assert FATAL.search(err)["action"] == "bring it back"


def test_an_unexpected_error_keeps_its_traceback(capsys):
    fail(ZeroDivisionError("deep inside"), RunProgress())
    assert "Traceback" in capsys.readouterr().err


def joint(*problems) -> ConfigError:
    """Return the error that reports several problems together."""
    with pytest.raises(ConfigError) as caught:
        raise_together(problems, summary="a test")
    return caught.value


def test_a_joint_error_has_the_class_of_its_parts_and_the_fix_of_a_single_one(capsys):
    assert classify(joint(DataError("a"), DataError("b")))[0] == "DATA"
    assert classify(joint(DataError("a"), ConfigError("b")))[0] == "CONFIG"
    fail(joint(DataError("a", fix="bring a")), RunProgress())
    assert FATAL.search(capsys.readouterr().err)["action"] == "bring a"


def test_the_same_facts_are_in_failure_json(tmp_path, capsys):
    progress = RunProgress(
        rank=1,
        iteration=12,
        where="saving a checkpoint",
        last_good_checkpoint=10,
        save_directory=str(tmp_path),
    )
    code = fail(CheckpointError("no space", flags=["--save"], fix="free 3 GiB"), progress)
    record = json.loads((tmp_path / "failure.json").read_text())
    line = FATAL.search(capsys.readouterr().err)
    assert (record["class"], record["exit_code"]) == (line["kind"], code)
    assert (record["iteration"], record["rank"]) == (12, 1)
    assert str(record["last_good_ckpt"]) == line["last"] == "10"
    assert record["where"] == line["where"] == "saving a checkpoint"
    assert record["action"] == line["action"] == "free 3 GiB"
    assert record["message"] == "no space"
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


def test_a_save_directory_that_cannot_be_written_does_not_hide_the_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    fail(ConfigError("x"), RunProgress(save_directory=str(tmp_path / "file" / "below")))
    assert FATAL.search(capsys.readouterr().err)


def test_of_several_ranks_one_reports(capsys):
    store = dist.HashStore()
    fail(DataError("broken"), RunProgress(rank=2), store)
    fail(RuntimeError("Connection closed by peer"), RunProgress(rank=0), store)
    assert len(FATAL.findall(capsys.readouterr().err)) == 1


def test_a_resumable_run_is_told_how_to_go_on(capsys):
    progress = RunProgress(last_good_checkpoint=5, save_directory="/nowhere/x")
    fail(RuntimeError("Connection closed by peer"), progress)
    assert "resume with --load /nowhere/x" in FATAL.search(capsys.readouterr().err)["action"]


def test_leaving_on_purpose_is_no_failure(capsys):
    with pytest.raises(SystemExit) as caught, failures_reported(RunProgress(), []):
        raise SystemExit(0)
    assert caught.value.code == 0
    assert capsys.readouterr().err == ""
