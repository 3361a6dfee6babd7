"""The command itself, as a user starts it: torchrun, SIGTERM, a failing command line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.distributed.training.test_pretraining import SMALL
from tests.harness.pool import REPOSITORY
from tests.harness.save_lock_holder import held_by_another_run
from tests.harness.started import environment, torchrun

LINE = re.compile(r" iteration +(\d+)/ +\d+ \|.* lm loss: ([\d.E+-]+) \|")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        words, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=240
    )


def test_torchrun_trains_two_ranks_and_writes_all_kinds_of_output(tmp_path):
    flags = (
        "--tensor-model-parallel-size 2 --log-throughput --log-params-norm --log-num-zeros-in-grad"
        " --log-progress --eval-interval 2 --eval-iters 1 --timing-log-level 2 --profile"
        " --profile-step-start 2 --profile-step-end 3 --manual-gc --check-for-spiky-loss"
        f" --use-flash-attn --log-rank 0 --tensorboard-dir {tmp_path}/tb --save {tmp_path}/save"
    )
    done = run(sys.executable, *torchrun(2), "pretrain_gpt.py", *f"{SMALL} {flags}".split())
    assert done.returncode == 0, done.stderr
    assert [int(i) for i, _ in LINE.findall(done.stdout)] == [1, 2, 3, 4]
    for expected in (
        "note: --use-flash-attn:", "throughput per GPU (TFLOP/s/GPU):", "params norm:",
        "num zeros:", "tokens/s/device:", "validation loss at iteration 2 | lm loss value:",
        "| exposed communication:",
        "validation loss at iteration 4 on test set", "forward-backward",
        "data_parallel_size = 1  (2 ranks / (tp 2 * pp 1 * cp 1))",
        f"profile of steps 2 to 2 on this rank: {tmp_path}/tb/trace-rank0.json",
    ):  # fmt: skip
        assert expected in done.stdout, expected
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))
    trace = json.loads((tmp_path / "tb" / "trace-rank0.json").read_text())
    marks = {event.get("name") for event in trace["traceEvents"]}
    assert marks >= {"step 2", "forward m0 c0", "backward m3 c0", "optimizer"}
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert "Iteration: 4" in (tmp_path / "save" / "progress.txt").read_text()


def test_sigterm_to_the_process_group_saves_the_present_step_and_leaves(tmp_path):
    """As launchers and schedulers send it: to the loader workers, too."""
    words = [*SMALL.split(), "--train-iters", "100000", "--exit-signal-handler"]
    words += ["--num-workers", "2"]
    words += ["--save", str(tmp_path / "save")]
    with subprocess.Popen(
        [sys.executable, "pretrain_gpt.py", *words],
        cwd=REPOSITORY,
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if LINE.search(line):
                os.killpg(process.pid, signal.SIGTERM)
                sent_at = time.monotonic()
                break
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert time.monotonic() - sent_at < 25
    text = "".join(lines) + rest
    assert "stopped by: a signal" in text
    last = int(LINE.findall(text)[-1][0])
    tracker = tmp_path / "save" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == last


def test_torchrun_starts_a_run_again_whose_rank_was_killed(tmp_path):
    """The killed rank is named; the next attempt continues from the newest checkpoint."""
    save = str(tmp_path / "save")
    words = [*SMALL.split(), "--train-iters", "20", "--save", save, "--load", save]
    words += ["--save-interval", "2", "--tensor-model-parallel-size", "2"]
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, *torchrun(2), "--max-restarts", "1", "pretrain_gpt.py", *words],
            cwd=REPOSITORY,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        deadline = time.monotonic() + 200
        while not (Path(save) / "iter_0000002").exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        victim = max(child.pid for child in psutil.Process(process.pid).children())
        os.kill(victim, signal.SIGKILL)
        assert process.wait(timeout=240) == 0, log.read_text()
    text = log.read_text()
    assert re.search(rf"\(process {victim}\) was killed by signal 9", text), text
    assert text.count("FATAL[PEER_LOST]") == 1
    assert "successfully loaded checkpoint from" in text
    record = json.loads((tmp_path / "save" / "failure.previous.json").read_text())
    assert (record["class"], record["attempt"]) == ("PEER_LOST", 0)
    assert (tmp_path / "save" / "iter_0000020").exists()


def test_a_bad_command_line_ends_with_one_line_and_no_traceback(tmp_path):
    done = run(sys.executable, "pretrain_gpt.py", "--num-layer", "4", "--lr", "fast")
    assert done.returncode == 10
    assert "did you mean --num-layers?" in done.stderr
    assert "'fast' is not a float" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("FATAL[CONFIG] rank=0 host=")
    assert "Traceback" not in done.stderr


def test_a_dry_run_plans_without_training(tmp_path):
    done = run(
        sys.executable, "pretrain_gpt.py", "--preset", "llama3-8b", "--seq-length", "8192",
        "--micro-batch-size", "1", "--global-batch-size", "64", "--bf16", "--lr", "1e-4",
        "--train-iters", "10", "--tensor-model-parallel-size", "4", "--sequence-parallel",
        "--pipeline-model-parallel-size", "4", "--num-virtual-stages-per-pipeline-rank", "2",
        "--dry-run", "--dry-run-world-size", "32", "--dry-run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for expected in (
        "32 = tensor 4 x pipeline 4 x context 1 x data 2", "8,03",
        "interleaved 1F1B, 32 micro batches",
        "simulated bubble 4.5%",  # (p-1)/(v*m+p-1) = 3/67
        "rank   3 |", "tools/memory_report.py", "FLOP per token", "--seq-length 8192",
    ):  # fmt: skip
        assert expected in done.stdout, (expected, done.stdout)


def test_a_second_run_in_a_save_directory_is_refused_before_anything_is_built(tmp_path):
    with held_by_another_run(tmp_path):
        done = run(sys.executable, "pretrain_gpt.py", *SMALL.split(), "--save", str(tmp_path))
    assert done.returncode == 12
    assert f"another run is saving into {tmp_path}" in done.stderr
    assert "where=claiming the save directory" in done.stderr
    assert "number of parameters" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [".lease"]


def test_failure_json_tells_what_went_wrong(tmp_path):
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "latest_checkpointed_iteration.txt").write_text("5")
    words = [*SMALL.split(), "--save", str(tmp_path), "--load", str(tmp_path / "lost")]
    done = run(sys.executable, "pretrain_gpt.py", *words)
    record = json.loads((tmp_path / "failure.json").read_text())
    assert done.returncode == record["exit_code"] == 12
    assert record["class"] == "CHECKPOINT"
    assert record["where"] == "reading the settings"
