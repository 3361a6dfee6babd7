"""Scripts for clusters parse, and what they start are commands of this project."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from megatron.launcher.command import read_launch
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
    scripts = [*(REPOSITORY / "examples").glob("**/*.sh")]
    assert scripts
    for script in [*scripts, *(REPOSITORY / "tools").glob("*.sh")]:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


def test_the_description_trains_with_flags_that_work(monkeypatch):
    job = read_launch([str(CLUSTER / "pretrain.yaml")]).job
    assert job.command[0] == "pretrain_gpt.py"
    trains(list(job.command[1:]), job.nodes * job.ranks_per_node, monkeypatch)


@pytest.mark.parametrize("flag", ["--shm-size", "--ulimit memlock=-1", "--gpus all"])
def test_the_image_is_run_with_the_flags_that_the_page_explains(flag):
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    assert flag in page
    assert flag in (REPOSITORY / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_the_image_gets_every_extra_that_its_programs_need(name):
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", (REPOSITORY / name).read_text())
    wanted = "tokenizers,hf,logging,wandb,config,data,fast,server,eval"
    assert set(extras.split(",")) == set(wanted.split(","))


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_the_image_is_built_on_a_version_that_is_named_from_files_that_exist(name):
    text = (REPOSITORY / name).read_text()
    assert re.search(r"^ARG BASE=\S+:\S*\d+\.\d+\S*$", text, re.MULTILINE)
    for words in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        for source in words.split():
            assert (REPOSITORY / source).exists(), source


def test_the_health_probe_of_the_image_says_that_this_machine_is_well():
    text = (REPOSITORY / "Dockerfile.cpu").read_text()
    (found,) = re.findall(r"HEALTHCHECK.*?CMD (\[.*?\])", text, re.DOTALL)
    _, *words = json.loads(found)
    done = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
