"""Scripts for clusters parse, and what they start are commands of this project."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml

from megatron.training.arguments import parse_args, validate_args
from tests.harness.pool import REPOSITORY

CLUSTER = REPOSITORY / "examples" / "cluster"
DATA = ("--data-path", "--tokenizer-type", "--tokenizer-model")


def trains(words: list[str], world_size: int, monkeypatch) -> None:
    """Check a command line with all rules, on mock data and in a world of that size."""
    kept, rest = [], iter(words)
    for word in rest:
        name, is_joined, _ = word.partition("=")
        if name not in DATA:
            kept.append(word)
        elif not is_joined:
            next(rest)
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))
    args = validate_args(parse_args(args=[*kept, "--mock-data"]))
    assert args.world_size == world_size
    assert args.data_parallel_size == world_size // 8


def test_shell_scripts_parse():
    scripts = [*(REPOSITORY / "examples").glob("**/*.sh"), *CLUSTER.glob("*.sbatch")]
    assert scripts
    for script in [*scripts, *(REPOSITORY / "tools").glob("*.sh")]:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


def test_the_slurm_script_starts_one_torchrun_a_machine_with_flags_that_work(tmp_path, monkeypatch):
    """SLURM's commands are replaced by scripts; `torchrun` writes down what it was given."""
    fakes = {
        "scontrol": 'echo "node-a"; sleep 0.1; echo "node-b"',
        "srun": 'shift 2; for n in 0 1; do SLURM_NODEID=$n "$@"; done',
        "torchrun": f'printf "%s\\n" "$@" > {tmp_path}/node$SLURM_NODEID',
    }
    (tmp_path / "bin").mkdir()
    for name, body in fakes.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "activate").write_text("")
    environment = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LATTICE_VENV": str(tmp_path),
        "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "lattice",
        "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "DATA": "/data/a b", "TOKENIZER": "/data/t",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", CLUSTER / "pretrain.sbatch", "--seed", "7"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        words = (tmp_path / f"node{number}").read_text().splitlines()
        launch, script, flags = words[: words.index("pretrain_gpt.py")], words.index, words
        assert launch == [
            "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "8",
            "--master-addr", "node-a", "--master-port", "20041",
        ]  # fmt: skip
        assert flags[script("--data-path") + 1] == "/data/a b"
        assert flags[-2:] == ["--seed", "7"]
    trains(words[words.index("pretrain_gpt.py") + 1 :], 16, monkeypatch)


def test_the_slurm_script_asks_for_what_it_needs(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("")
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho a\n")
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    done = subprocess.run(
        ["bash", CLUSTER / "pretrain.sbatch"],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LATTICE_VENV": str(tmp_path),
             "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "x"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "set DATA to the prefix of a corpus" in done.stderr


def test_options_of_sbatch_stand_before_the_first_command():
    lines = (CLUSTER / "pretrain.sbatch").read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options == [line for line in lines[:first] if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in options)


def test_the_kubernetes_manifest_starts_torchrun_with_flags_that_work(monkeypatch):
    (job,) = yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert [*trainer["command"], trainer["args"][0]] == ["torchrun", "pretrain_gpt.py"]
    world_size = trainer["numNodes"] * trainer["numProcPerNode"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    trains(trainer["args"][1:], world_size, monkeypatch)
    (pod,) = job["spec"]["podTemplateOverrides"]
    mounted = {m["name"] for c in pod["spec"]["containers"] for m in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("flag", ["--shm-size", "--ulimit memlock=-1", "--gpus all"])
def test_the_image_is_run_with_the_flags_that_the_page_explains(flag):
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    assert flag in page
    assert flag in (REPOSITORY / "Dockerfile").read_text()


def test_the_image_gets_every_extra_that_its_programs_need():
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", (REPOSITORY / "Dockerfile").read_text())
    wanted = "tokenizers,hf,logging,wandb,config,data,fast,server,eval"
    assert set(extras.split(",")) == set(wanted.split(","))
