"""A file and flags describe one job; what cannot be used is refused in one message."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.launcher.command import main, read_launch
from megatron.launcher.job import Job

FILE = """
name: big
nodes: 4
check: true
env: {A: 1, B: true}
mount: [/d:/data:ro]
cluster:
  partition: gpu
  slurm-option: --qos=high
command: [train.py, --lr, 0.001]
"""


def read(tmp_path, text, *words):
    (tmp_path / "job.yaml").write_text(text)
    argv = [str(tmp_path / "job.yaml"), *words]
    return read_launch(argv).job


def test_a_file_says_all_that_flags_say(tmp_path):
    job = read(tmp_path, FILE)
    assert (job.name, job.nodes, job.check, job.slurm.partition) == ("big", 4, True, "gpu")
    assert job.environment == {"A": "1", "B": "1"}
    assert job.slurm.slurm_option == ("--qos=high",)
    assert job.command == ("train.py", "--lr", "0.001")
    (mount,) = job.mounts
    assert (mount.source, mount.target, mount.is_read_only) == ("/d", "/data", True)


def test_flags_are_stronger_and_words_of_the_command_are_added_or_replace_it(tmp_path):
    job = read(tmp_path, FILE, "--nodes", "8", "--env", "C=3", "--", "--seed", "7")
    assert (job.nodes, job.environment) == (8, {"A": "1", "B": "1", "C": "3"})
    assert job.command == ("train.py", "--lr", "0.001", "--seed", "7")
    assert read(tmp_path, FILE, "--", "other.py").command == ("other.py",)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nodse: 2", "did you mean nodes"),
        ("nodes: two", "nodes"),
        ("nodes: [2]", "is not one value"),
        ("check: 1", "is not true or false"),
        ("- a", "holds no settings"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: !!python/object/apply:os.system [x]", "cannot be read"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(text, found, tmp_path):
    with pytest.raises(ConfigError, match=found):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (dict(nodes=0), "nodes=0"),
        (dict(gpus_per_node=0), "without processes_per_node"),
        (dict(name="A b"), "name='A b'"),
        (dict(env=("A",)), "'A' has no name"),
        (dict(env=("A B=1",)), "has no name"),
        (dict(mount=("a:b",)), "not a mount"),
        (dict(command=()), "no training command"),
        (dict(command=("/usr/bin/torchrun", "x.py")), "begins with /usr/bin/torchrun"),
        (dict(time_limit_s=60), "time_limit is 60 s"),
        (dict(directory="a b"), "holds a space"),
    ],
)
def test_a_job_that_cannot_work_is_refused(settings, found):
    with pytest.raises(ConfigError, match=found):
        Job(**{"command": ("t.py",)} | settings).check_settings()


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        (("--save", "a", "--save", "b"), "b"),
        (("--save=a", "--save", "b"), "b"),
        (("--save", "a", "--save=b"), "b"),
        (("--load", "a"), ""),
    ],
)
def test_the_last_of_several_values_counts_as_on_the_command_line(words, directory):
    assert Job(command=("train.py", *words)).value_of("--save") == directory


def test_all_problems_are_in_one_message():
    with pytest.raises(ConfigError) as raised:
        Job(nodes=0, name="?", command=()).check_settings()
    assert len(raised.value.problems) == 3


def test_the_launcher_imports_no_torch():
    code = "import sys, megatron.launcher.command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_of_a_job_are_for_their_owner_and_replace_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("kept")
    (tmp_path / "runs" / "lattice").mkdir(parents=True)
    (tmp_path / "runs" / "lattice" / "lattice.sbatch").symlink_to(tmp_path / "other")
    for _ in range(2):
        assert main(["launch", "--write-only", "--", "train.py"]) == 0
    (written,) = (tmp_path / "runs" / "lattice").iterdir()
    assert written.stat().st_mode & 0o777 == 0o600
    assert not written.is_symlink()
    assert (tmp_path / "other").read_text() == "kept"


def test_variables_that_look_like_secrets_are_warned_of(capsys):
    words = ["--env", "WANDB_API_KEY=x", "--env", "HF_TOKEN=y", "--env", "A=z"]
    assert main(["launch", *words, "--dry-run", "--", "train.py"]) == 0
    assert "# WANDB_API_KEY, HF_TOKEN: the value is written" in capsys.readouterr().out
