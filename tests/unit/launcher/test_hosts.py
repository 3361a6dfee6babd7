"""ssh and mpirun are given one torchrun for each node, and a failure ends and restarts all."""

from __future__ import annotations

import os

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.launcher import hosts
from megatron.launcher.command import main
from megatron.launcher.job import HostSettings, Job

SSH = """#!/bin/bash
[ "$1" = -tt ] && [ "$2" = -p22 ] || exit 99
echo "$3" >>"$FOLDER/hosts-used"
[ "$3" = "$LOST" ] && exit 255
exec bash -c "$4"
"""
MPIRUN = """#!/bin/bash
[ "$*" = "-np 2 --map-by ppr:1:node --bind-to none --host a,b -p22 bash ${@: -1}" ] || exit 99
OMPI_COMM_WORLD_RANK=0 bash "${@: -1}" & first=$!
OMPI_COMM_WORLD_RANK=1 bash "${@: -1}" && wait $first
"""
TORCHRUN = """#!/bin/bash
echo "$A $*" >>"$FOLDER/starts"
[ "$(wc -l <"$FOLDER/starts")" -gt "$FAILS" ]
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Stand-ins for the commands, and a hostfile of three hosts."""
    (tmp_path / "bin").mkdir()
    for name, text in (("ssh", SSH), ("mpirun", MPIRUN), ("torchrun", TORCHRUN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\nc slots=2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("FAILS", "0")
    monkeypatch.setenv("LOST", "")
    return tmp_path


def launch(backend, *flags):
    common = ("--hostfile", "hosts", "--nodes", "2", "--backoff-s", "0", "--ssh-option=-p22")
    command = ("--env", "A=x y", *flags, "--", "train.py", "--name", "it's")
    return main(["launch", "--backend", backend, *common, *command])


@pytest.mark.parametrize("backend", ["ssh", "mpi"])
def test_each_node_starts_torchrun_with_its_number(backend, cluster):
    assert launch(backend) == 0
    assert sorted((cluster / "starts").read_text().splitlines()) == [
        f"x y --nnodes 2 --node-rank {n} --nproc-per-node 8 --master-addr a --master-port 29500"
        " train.py --name it's"
        for n in (0, 1)
    ]


@pytest.mark.parametrize("backend", ["ssh", "mpi"])
def test_a_failure_starts_all_nodes_again(backend, cluster, monkeypatch, capfd):
    monkeypatch.setenv("FAILS", "2")
    assert launch(backend, "--max-restarts", "2") == 0
    assert "started again" in capfd.readouterr().err
    assert len((cluster / "starts").read_text().splitlines()) >= 3


def test_a_run_that_keeps_failing_ends_with_its_status(cluster, monkeypatch):
    monkeypatch.setenv("FAILS", "100")
    assert launch("ssh", "--max-restarts", "1") == 1


def hosts_used(cluster):
    return (cluster / "hosts-used").read_text().split()


def test_a_host_that_ssh_does_not_reach_is_replaced_by_another_of_the_file(cluster, monkeypatch):
    monkeypatch.setenv("LOST", "b")
    assert launch("ssh", "--gpus-per-node", "2") == 0
    assert set(hosts_used(cluster)[2:]) == {"a", "c"}


def test_with_min_nodes_the_run_continues_on_fewer(cluster, monkeypatch):
    monkeypatch.setenv("LOST", "b")
    assert launch("ssh", "--nodes", "3", "--gpus-per-node", "2", "--min-nodes", "1") == 0
    last = (cluster / "starts").read_text().splitlines()[-1]
    assert "--nnodes 2 " in last, last
    assert "b" not in hosts_used(cluster)[3:]


def test_without_another_host_a_lost_one_ends_the_job(cluster, monkeypatch, capfd):
    monkeypatch.setenv("LOST", "b")
    assert launch("ssh", "--nodes", "3", "--gpus-per-node", "2") == 255
    assert "b are lost" in capfd.readouterr().err


@pytest.mark.parametrize("backend", ["ssh", "mpi"])
def test_hosts_of_the_quarantine_are_left_out(backend, cluster):
    (cluster / "bad").write_text("a  # iteration 7\n")
    job = Job(
        command=("t.py", "--quarantine-file", "bad"), nodes=2, gpus_per_node=2,
        hosts=HostSettings(hostfile="hosts"),
    )  # fmt: skip
    plan = hosts.plan_ssh(job) if backend == "ssh" else hosts.plan_mpi(job)
    shown = plan.shown()
    assert "--master-addr b" in shown and "--master-addr a" not in shown


@pytest.mark.parametrize(
    ("kind", "num_starts"), [("CONFIG", 1), ("CRASH", 3)], ids=["useless", "three times the same"]
)
def test_a_failure_that_would_come_again_is_not_repeated(
    kind, num_starts, cluster, monkeypatch, capfd
):
    record = f'{{"class": "{kind}", "rank": 0, "iteration": 7, "message": "it broke"}}'
    (cluster / "bin" / "torchrun").write_text(
        "#!/bin/bash\necho $* >>$FOLDER/starts\nmkdir -p run\n"
        f"echo '{record}' >run/failure.json\nfalse\n"
    )
    flags = ("--nodes", "1", "--hostfile", "hosts", "--backoff-s", "0", "--max-restarts", "9")
    command = ("--ssh-option=-p22", "--", "train.py", "--save", "run")
    assert main(["launch", "--backend", "ssh", *flags, *command]) == 1
    assert len((cluster / "starts").read_text().splitlines()) == num_starts
    assert "it broke" in capfd.readouterr().err


def test_the_check_comes_first_on_each_node(cluster):
    assert launch("ssh", "--check") == 0
    lines = (cluster / "starts").read_text().splitlines()
    assert sum("node_health --num-gpus 8" in line for line in lines) == 2
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (dict(nodes=4), "names 3 hosts"),
        (dict(nodes=3), "c has 2 slots, and a node 8 ranks"),
        (dict(hosts=HostSettings()), "no hostfile"),
    ],
)
def test_a_hostfile_that_does_not_suffice_is_refused(settings, found, cluster):
    job = Job(**{"command": ("t.py",), "hosts": HostSettings(hostfile="hosts")} | settings)
    with pytest.raises(ConfigError, match=found):
        hosts.plan_ssh(job)


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x slots=1", "a", "a slots=0", "a slots=x", "a slots=1\na slots=2", ""]
)
def test_a_line_that_is_no_host_is_refused(line):
    """A name that begins with `-` would be an option of ssh."""
    with pytest.raises(ConfigError, match=r"slots=N"):
        hosts.read_hostfile(line, "hosts")


def test_a_command_that_is_not_installed_is_named(cluster, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(cluster))
    assert launch("ssh") == 2
    assert "there is no command ssh here" in capsys.readouterr().err
