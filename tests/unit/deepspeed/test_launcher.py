"""The arguments of DeepSpeed's launcher become torchrun's."""

from __future__ import annotations

import os
import shlex
import sys
import time

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.deepspeed import launcher
from megatron.deepspeed.hosts import read_hostfile
from tests.harness.machine import free_port
from tests.harness.pool import REPOSITORY

HOSTS = "# two machines\na slots=4\nb  slots=2   # the small one\n\n"

SCRIPT = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--deepspeed", action="store_true")
args = parser.parse_args()
name = os.environ["RANK"]
told = [os.environ[n] for n in ("WORLD_SIZE", "NCCL_X")]
told.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
open(f"rank{name}", "w").write(f"{told} {args.local_rank} {args.deepspeed}")
"""


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """A hostfile, in an otherwise empty home and working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "hosts"
    file.write_text(HOSTS)
    return str(file)


def planned(*words):
    return launcher.plan(launcher.read_flags([*words, "train.py", "--lr", "1"]))


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ("", {"a": (0, 1, 2, 3), "b": (0, 1)}),
        ("--num_nodes 1", {"a": (0, 1, 2, 3)}),
        ("--num_gpus 2", {"a": (0, 1), "b": (0, 1)}),
        ("--include a:1,3@b", {"a": (1, 3), "b": (0, 1)}),
        ("--include b:0", {"b": (0,)}),
        ("--exclude a:0@b", {"a": (1, 2, 3)}),
    ],
)
def test_flags_choose_machines_and_slots_of_the_hostfile(hosts, flags, slots):
    found = planned("--hostfile", hosts, *flags.split())
    assert {node.host: node.slots for node in found} == slots


def test_every_machine_gets_the_command_of_its_number(hosts):
    for number, node in enumerate(planned("--hostfile", hosts, "--master_port", "1234")):
        assert node.command == (
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}",
            f"--nproc-per-node={len(node.slots)}", "--master-addr=a", "--master-port=1234",
            "-m", "megatron.compatibility.local_rank", "train.py", "--lr", "1",
        )  # fmt: skip


def test_chosen_slots_and_variables_reach_the_machine(hosts, monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (tmp_path / launcher.ENVIRONMENT_FILE).write_text("MY_NAME=a b\n# no=1\n")
    first, second = planned("--hostfile", hosts, "--include", "a:1,3@b")
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in second.environment
    line = shlex.split(second.shell("/w d"))
    assert line[:2] == ["cd", "/w d;"]
    assert "MY_NAME=a b;" in line
    assert "NCCL_DEBUG=INFO;" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--include c", "'c' is not there"),
        ("--include a:9", "'a:9' is not there"),
        ("--include a --exclude b", "--include beside --exclude"),
        ("--exclude a@b", "leaves nothing"),
        ("--num_gpus 3", "b has 2 slots"),
        ("--num_nodes 3", "--num_nodes 3 of 2 hosts"),
        ("--launcher openmpi", "--launcher openmpi"),
        ("--autotuning run", "tools/plan.py search"),
        ("--bind_cores_to_rank", "numactl"),
    ],
)
def test_what_cannot_be_followed_is_refused(hosts, flags, said):
    with pytest.raises(ConfigError) as caught:
        planned("--hostfile", hosts, *flags.split(), "--")
    assert said in str(caught.value)


def test_commands_for_several_machines_are_printed(hosts, capsys):
    assert launcher.main(["--hostfile", hosts, "train.py", "--deepspeed"]) == 0
    said = capsys.readouterr().out
    assert "# machine 1, b:" in said
    assert "--node-rank=1 --nproc-per-node=2 --master-addr=a" in said
    assert "--launcher ssh" in said


def test_one_machine_of_several_is_started_without_ssh(hosts, monkeypatch):
    called = []
    monkeypatch.setattr(launcher.subprocess, "call", lambda c, env: called.append(c) or 0)
    assert launcher.main(["--hostfile", hosts, "--no_ssh", "--node_rank", "1", "t.py"]) == 0
    assert "--node-rank=1" in called[0]
    assert launcher.main(["--hostfile", hosts, "--no_ssh", "t.py"]) == 2


def test_pdsh_numbers_the_machines(hosts, monkeypatch, tmp_path):
    seen = tmp_path / "seen"
    (tmp_path / "pdsh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\n')
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["--hostfile", hosts, "--num_gpus", "2", "--launcher", "pdsh", "train.py"]
    assert launcher.main(words) == 0
    said = seen.read_text().splitlines()
    assert said[said.index("-w") + 1] == "a,b"
    assert "--node-rank=%n" in said[-1]


def test_a_script_is_started_on_this_machine(hosts, monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(launcher.subprocess, "call", lambda c, env: called.append(c) or 7)
    assert launcher.main(["--num_gpus", "2", "--no_local_rank", "train.py", "--deepspeed"]) == 7
    assert called[0][3:] == (
        "--nnodes=1", "--node-rank=0", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        "--master-port=29500", "train.py", "--deepspeed",
    )  # fmt: skip


def test_two_machines_are_started_by_ssh_and_meet(tmp_path, monkeypatch):
    """The machines are this one, under two names; `ssh` is a script that runs what it is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=2\n")
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("NCCL_X", "y")
    words = ["--hostfile", "hosts", "--include", "one@two:1", "--launcher", "ssh"]
    words += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    assert launcher.main([*words, "train.py", "--deepspeed"]) == 0
    assert (tmp_path / "rank0").read_text() == "['2', 'y', None] 0 True"
    assert (tmp_path / "rank1").read_text() == "['2', 'y', '1'] 0 True"


def test_the_first_machine_that_fails_ends_the_others(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text('#!/bin/sh\n[ "$1" = one ] && exit 3\nexec sleep 60\n')
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = time.monotonic()
    assert launcher.main(["--hostfile", "hosts", "--launcher", "ssh", "train.py"]) == 3
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x slots=1", "a", "a slots=0", "a slots=x", "a slots=1\na slots=2", ""]
)
def test_a_line_that_is_no_host_is_refused(line):
    """A name that begins with `-` would be an option of ssh."""
    with pytest.raises(ConfigError, match=r"slots=N"):
        read_hostfile(line, "hosts")
