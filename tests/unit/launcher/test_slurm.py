"""The batch script chooses nodes, restarts, is queued again and gives up as it should.

The scheduler is `tests.harness.slurm`; `torchrun` is a script that does what a test says.
"""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.launcher import slurm
from megatron.launcher.command import main, read_launch
from megatron.launcher.job import Job
from tests.harness.slurm import Slurm

COMMAND = ("--", "train.py", "--save", "save", "--exit-signal-handler")


class Cluster:
    """A scheduler, with a `torchrun` of which each start writes a line into `starts`."""

    def __init__(self, folder, monkeypatch, body: str, nodes: int = 3) -> None:
        self.folder = folder
        self.slurm = Slurm(folder, [f"node{number}" for number in range(nodes)])
        monkeypatch.chdir(folder)
        monkeypatch.setattr(slurm, "_SETTLE_S", 0)
        for name, value in self.slurm.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("FOLDER", str(folder))
        script = self.slurm.bin / "torchrun"
        script.write_text(
            '#!/bin/bash\necho "$SLURMD_NODENAME $*" >>"$FOLDER/starts"\n'
            'starts=$(wc -l <"$FOLDER/starts")\n' + body
        )
        script.chmod(0o755)

    def submit(self, *flags: str, command: tuple[str, ...] = COMMAND) -> None:
        words = ["--nodes", "2", "--gpus-per-node", "8", "--backoff-s", "0", "--name", "job"]
        assert main(["launch", *words, *flags, *command]) == 0

    def starts(self) -> list[str]:
        """Return what torchrun was told at each start, sorted within each attempt of two nodes."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for n in range(0, len(lines), 2) for line in sorted(lines[n : n + 2])]

    def on(self) -> list[str]:
        return [line.split()[0] for line in self.starts()]


def test_each_node_starts_one_torchrun_with_its_rank_and_the_address_of_the_first(
    tmp_path, monkeypatch
):
    cluster = Cluster(tmp_path, monkeypatch, "echo OMP=$OMP_NUM_THREADS A=$A; exit 0")
    cluster.submit(
        "--cpus-per-node", "32", "--env", "A=b c", command=(*COMMAND, "--x", "two words")
    )
    with cluster.slurm.running():
        job = cluster.slurm.wait("41")
    assert (job["state"], job["restarts"]) == ("COMPLETED", 0)
    assert cluster.starts() == [
        f"node{n} --nnodes 2 --node-rank {n} --nproc-per-node 8 --master-addr node0"
        f" --master-port {20000 + 41 * 7} train.py --save save --exit-signal-handler --x two words"
        for n in (0, 1)
    ]
    lines = sorted(cluster.slurm.log("41").splitlines())
    assert lines == ["0: OMP=4 A=b c", "1: OMP=4 A=b c"]


def test_a_run_that_fails_is_started_again_at_another_port_until_it_has_failed_too_often(
    tmp_path, monkeypatch
):
    cluster = Cluster(tmp_path, monkeypatch, "exit 9")
    cluster.submit("--max-restarts", "2")
    with cluster.slurm.running():
        job = cluster.slurm.wait("41")
    assert (job["state"], job["status"]) == ("FAILED", 9)
    assert "failed 3 times" in cluster.slurm.log("41")
    ports = [line.split("--master-port ")[1].split()[0] for line in cluster.starts()]
    assert [int(port) for port in sorted(set(ports))] == [20287, 20288, 20289]


@pytest.mark.parametrize("kind", ["CONFIG", "DATA", "MISSING_LIBRARY"])
def test_a_failure_that_would_come_again_ends_the_job_at_once(kind, tmp_path, monkeypatch):
    record = shlex.quote(f'{{"class": "{kind}"}}')
    cluster = Cluster(
        tmp_path, monkeypatch, f"mkdir -p save; echo {record} >save/failure.json; exit 1"
    )
    cluster.submit()
    with cluster.slurm.running():
        assert cluster.slurm.wait("41")["state"] == "FAILED"
    assert len(cluster.starts()) <= 2


def test_a_spare_node_takes_the_place_of_one_that_fails(tmp_path, monkeypatch):
    """The first attempt fails, and its first node starts nothing any more."""
    down = 'touch "$SLURM_STAND_IN/down-node0"; [ $starts -gt 2 ] || exit 1'
    cluster = Cluster(tmp_path, monkeypatch, down)
    python = cluster.slurm.bin / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    cluster.submit("--spare-nodes", "1")
    with cluster.slurm.running():
        assert cluster.slurm.wait("41")["state"] == "COMPLETED", cluster.slurm.log("41")
    assert cluster.on() == ["node0", "node1", "node1", "node2"]
    assert "node0 did not pass its health check" in cluster.slurm.log("41")
    assert cluster.starts()[2].startswith("node1 --nnodes 2 --node-rank 0")
    assert "--master-addr node1 " in cluster.starts()[3]


def test_too_few_healthy_nodes_end_the_job_with_their_number(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, monkeypatch, "exit 0")
    python = cluster.slurm.bin / "python"
    python.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" = node1 ]\n')
    python.chmod(0o755)
    cluster.submit("--spare-nodes", "1")
    with cluster.slurm.running():
        assert cluster.slurm.wait("41")["state"] == "FAILED"
    assert "1 healthy nodes of 3, and 2 are needed" in cluster.slurm.log("41")
    assert not cluster.starts()


def test_the_nodes_are_checked_together_before_the_training(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, monkeypatch, 'case "$*" in *node_health*) exit 1;; esac')
    python = cluster.slurm.bin / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    cluster.submit("--check")
    with cluster.slurm.running():
        assert cluster.slurm.wait("41")["state"] == "FAILED"
    assert "the nodes did not pass their check" in cluster.slurm.log("41")
    assert all("-m megatron.resilience.node_health" in line for line in cluster.starts())


SAVES_WHEN_TOLD = """
trap 'trap "" TERM; echo saved >>"$FOLDER/saves"; kill $!; exit 1' TERM
[ -e "$FOLDER/saves" ] && exit 0
echo training; sleep 60 & wait
"""


@pytest.mark.parametrize("event", ["end_of_time_comes", "preempt"])
def test_a_job_that_has_to_leave_saves_and_is_queued_again(event, tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, monkeypatch, SAVES_WHEN_TOLD)
    cluster.submit("--time-limit", "01:00:00")
    with cluster.slurm.running():
        cluster.slurm.wait_for_text("41", "1: training")
        cluster.slurm.wait_for_text("41", "0: training")
        getattr(cluster.slurm, event)("41")
        job = cluster.slurm.wait("41")
    assert (job["state"], job["restarts"]) == ("COMPLETED", 1), cluster.slurm.log("41")
    assert (tmp_path / "saves").read_text() == "saved\n" * 2
    assert "queued again" in cluster.slurm.log("41")


def test_a_job_is_not_queued_again_for_ever(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, monkeypatch, SAVES_WHEN_TOLD.replace("exit 0", "rm $FOLDER/saves"))
    cluster.submit("--max-requeues", "0")
    with cluster.slurm.running():
        cluster.slurm.wait_for_text("41", "1: training")
        cluster.slurm.wait_for_text("41", "0: training")
        cluster.slurm.end_of_time_comes("41")
        assert cluster.slurm.wait("41")["state"] == "FAILED"


def test_jobs_in_a_row_run_one_after_the_other_until_one_reaches_the_end(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, monkeypatch, SAVES_WHEN_TOLD)
    cluster.submit("--num-jobs", "4")
    with cluster.slurm.running():
        cluster.slurm.wait_for_text("41_1", "1: training")
        cluster.slurm.wait_for_text("41_1", "0: training")
        cluster.slurm.end_of_time_comes("41_1")
        states = [cluster.slurm.wait(f"41_{n}")["state"] for n in (1, 2, 3, 4)]
    assert states == ["COMPLETED", "COMPLETED", "CANCELLED", "CANCELLED"]
    assert len(cluster.starts()) == 4


def test_each_variant_is_a_job_with_words_of_its_own_and_a_number(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, monkeypatch, "exit 0")
    cluster.submit(
        "--variant=--lr 1e-3", "--variant=--lr 1e-4",
        command=("--", "train.py", "--save", "runs/lr-{variant}"),
    )  # fmt: skip
    with cluster.slurm.running():
        assert {cluster.slurm.wait(f"41_{n}")["state"] for n in (0, 1)} == {"COMPLETED"}
    ends = {line.split("train.py ")[1] for line in cluster.starts()}
    assert ends == {"--save runs/lr-0 --lr 1e-3", "--save runs/lr-1 --lr 1e-4"}


def test_variants_do_not_share_a_save_directory():
    with pytest.raises(ConfigError, match="all variants save to save"):
        read_launch(["--variant=--lr 1", *COMMAND])


@pytest.mark.parametrize(
    "flags",
    ["", "--check --spare-nodes 1", "--image a:1 --mount /d:/d:ro --setup 'module load cuda'",
     "--num-jobs 3 --cpus-per-node 3 --time-limit 2-00:00:00", "--variant '--lr 1'"],
)  # fmt: skip
def test_every_script_parses_and_its_options_precede_its_commands(flags):
    command = ("--", "train.py", "it's", "--save", "s-{variant}")
    job = read_launch([*shlex.split(flags), *command]).job
    script = slurm.script(job)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = script.splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options
    assert max(options) < first


def test_the_time_limit_is_days_hours_and_minutes_or_what_yaml_makes_of_them(tmp_path):
    (tmp_path / "job.yaml").write_text("time_limit: 24:00:00\ncommand: [train.py]\n")
    job = read_launch([str(tmp_path / "job.yaml")]).job
    assert job.time_limit_s == 86400
    assert "#SBATCH --time=24:00:00" in slurm.script(job)
    assert "#SBATCH --time=49:00:30" in slurm.script(
        Job(command=("train.py",), time_limit_s=49 * 3600 + 30)
    )


def test_claims_are_no_mounts_for_slurm():
    with pytest.raises(ConfigError, match="claim"):
        slurm.plan(Job(command=("train.py",), mount=("data:/data",)))


def test_no_stand_in_is_on_the_path_by_accident():
    assert "SLURM_STAND_IN" not in os.environ
