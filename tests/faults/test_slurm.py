"""A job of `lattice launch` under the stand-in for SLURM ends as an undisturbed run does."""

import os
import re

import pytest

from megatron.launcher import slurm as backend
from megatron.launcher.command import main
from tests.faults.checks import References, check_curve, newest
from tests.faults.job import MODEL, NUM_STEPS, SCRIPT
from tests.harness.pool import REPOSITORY
from tests.harness.slurm import Slurm


@pytest.mark.distributed
def test_a_training_that_is_told_to_stop_and_queued_again_ends_with_the_undisturbed_curve(
    tmp_path, monkeypatch
):
    """Two nodes of one rank; SIGUSR1 as before the time limit after some steps."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(backend, "_SETTLE_S", 0)  # the steps take two seconds in all
    slurm = Slurm(tmp_path, ["127.0.0.1", "127.0.0.2"])
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("LATTICE_DEVICE", "cpu")
    save = str(tmp_path / "save")
    status = main([
        "launch", "--backend", "slurm", "--directory", str(tmp_path / "job"), "--nodes", "2",
        "--gpus-per-node", "0", "--processes-per-node", "1", "--time-limit", "00:10:00",
        "--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1", "--",
        SCRIPT, *MODEL.split(), "--num-workers", "0", "--train-iters", str(NUM_STEPS),
        "--save-interval", str(NUM_STEPS), "--save", save, "--load", save, "--exit-signal-handler",
        "--metrics-jsonl", str(tmp_path / "metrics"), "--slow-step", "0.02",
    ])  # fmt: skip
    assert status == 0
    with slurm.running():
        slurm.wait_for_text("41", "iteration        3/")
        slurm.end_of_time_comes("41")
        slurm.wait("41", "REQUEUED", "PENDING")
        saved = newest(tmp_path / "save")
        job = slurm.wait("41")
    text = slurm.log("41")
    assert (job["state"], job["restarts"]) == ("COMPLETED", 1), text
    assert 3 <= saved < NUM_STEPS
    assert re.search(rf"successfully loaded checkpoint.* {saved}\b", text), text[-3000:]
    reference = References(tmp_path / "reference").curve(2)
    assert not check_curve(tmp_path, reference, NUM_STEPS)
    assert not [name for name in os.listdir(tmp_path / "save") if ".tmp" in name]
