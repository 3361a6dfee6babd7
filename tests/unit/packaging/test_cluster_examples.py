"""The files in examples/cluster fit their schemas and start commands of this project."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from examples.cluster import ray_train
from megatron.training.arguments import parse_args, validate_args
from tests.cluster_schemas.cases import CLUSTER, SCHEMA_OF, SCHEMAS, document_of, misspelt
from tests.harness.json_schema import problems
from tests.harness.pool import REPOSITORY

SBATCH = CLUSTER / "pretrain.sbatch"


def schema_problems(document, kind):
    return problems(document, SCHEMAS["schemas"][kind], SCHEMAS["$defs"])


@pytest.mark.parametrize(("name", "kind"), SCHEMA_OF.items())
def test_a_file_fits_its_schema_and_a_misspelt_field_does_not(name, kind):
    document = document_of(name)
    assert not schema_problems(document, kind)
    if name == "skypilot.yaml":
        assert not schema_problems(document["resources"], "SkyPilotResources")
    changed = list(misspelt(document))
    assert len(changed) >= 8
    assert not [field for field, one in changed if not schema_problems(one, kind)]


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_containers_have_shared_memory_and_no_privilege_but_locked_memory(name):
    text = (CLUSTER / name).read_text()
    for part in ("mountPath: /dev/shm", "medium: Memory", "IPC_LOCK", "readOnly: true",
                 "allowPrivilegeEscalation: false",
                 "terminationGracePeriodSeconds: 300"):  # fmt: skip
        assert part in text, part
    assert "privileged" not in text


def shell_words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "), comments=True)


def job_set_words() -> list[str]:
    document = document_of("jobset.yaml")
    (replicated,) = document["spec"]["replicatedJobs"]
    inner = replicated["template"]["spec"]
    (container,) = inner["template"]["spec"]["containers"]
    words = shell_words(container["command"][2])
    name, nodes = document["metadata"]["name"], str(inner["parallelism"])
    # <JobSet>-<replicated job>-<job index>-<pod index>.<JobSet>
    address = f"{name}-{replicated['name']}-0-0.{name}"
    assert words[words.index("--master-addr") + 1] == address
    assert words[words.index("--nnodes") + 1] == nodes == str(inner["completions"])
    return words


def sbatch_words() -> list[str]:
    (words,) = re.findall(r"^command=\((.*?)^\)", SBATCH.read_text(), re.DOTALL | re.MULTILINE)
    return shlex.split(words.replace("$save", "/runs/llama3-8b"))


COMMANDS = {
    "sbatch": sbatch_words,
    "trainjob": lambda: document_of("trainjob.yaml")["spec"]["trainer"]["args"],
    "jobset": job_set_words,
    "skypilot": lambda: shell_words(document_of("skypilot.yaml")["run"]),
    "ray": lambda: shlex.split(ray_train.COMMAND),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_training_command_passes_all_rules_on_two_nodes_of_eight_gpus(kind, monkeypatch):
    words = COMMANDS[kind]()
    words = words[words.index("pretrain_gpt.py") + 1 :]
    joined = " ".join(words).replace("=", " ").split()
    assert joined == " ".join(sbatch_words()[1:]).split(), "all examples start the same training"
    for name in ("--data-path", "--tokenizer-type", "--tokenizer-model"):
        place = joined.index(name)
        del joined[place : place + 2]
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 16)):
        monkeypatch.setenv(name, str(value))
    args = validate_args(parse_args(args=[*joined, "--mock-data"]))
    assert (args.world_size, args.data_parallel_size) == (16, 2)


# SLURM -------------------------------------------------------------------------------------------

STAND_INS = {
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@" & tasks+=($!); done
        for task in "${tasks[@]}"; do wait "$task" || status=1; done
        exit "${status:-0}" """,
    "scontrol": """
        case "$1" in
            show) printf 'node0\\nnode1\\n' ;;
            requeue) echo "$2" >>requeued; kill -9 $PPID ;;
        esac""",
    "scancel": '[ "$*" = "--signal=TERM 41" ] && kill $(cat torchrun-*)',
    "sleep": 'exec "$REAL_SLEEP" 0.01',
    "torchrun": """
        case "$*" in *node_health*) exit "${CHECK:-0}" ;; esac
        echo "$@" >>starts
        eval "$TRAINING" """,
}
"""Commands of SLURM as its manual pages describe them, for one job of two nodes with number 41."""


@pytest.fixture
def start_job(tmp_path):
    """Return a function that starts the batch script with a shell command for the training."""
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    script = SBATCH.read_text().replace("save=/runs/llama3-8b", "save=.")
    (tmp_path / "pretrain.sbatch").write_text(script)

    def start(training: str, **variables: str) -> subprocess.Popen[bytes]:
        (real_sleep,) = [p for p in ("/bin/sleep", "/usr/bin/sleep") if os.path.exists(p)][:1]
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "41",
            "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_PER_TASK": "64", "REAL_SLEEP": real_sleep, "TRAINING": training,
        }  # fmt: skip
        with open(tmp_path / "log", "w") as log:
            return subprocess.Popen(
                ["bash", "pretrain.sbatch"], cwd=tmp_path, env=environment | variables, stderr=log
            )

    return start


def test_the_options_of_the_batch_script_precede_its_commands():
    lines = SBATCH.read_text().splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(options) < first
    assert "#SBATCH --requeue" in lines
    assert "#SBATCH --signal=B:USR1@300" in lines


def test_each_node_starts_one_torchrun_with_its_rank_and_the_address_of_the_first(
    start_job, tmp_path
):
    assert start_job("exit 0").wait(30) == 0
    starts = sorted((tmp_path / "starts").read_text().splitlines())
    words = shlex.join(sbatch_words()).replace("/runs/llama3-8b", ".")
    assert starts == [
        f"--nnodes 2 --node-rank {rank} --nproc-per-node 8 --master-addr node0"
        f" --master-port {20000 + 41 * 7} {words}"
        for rank in (0, 1)
    ]


def test_a_failed_run_is_restarted_at_another_port_up_to_the_limit(start_job, tmp_path):
    assert start_job("exit 9").wait(30) == 1
    starts = (tmp_path / "starts").read_text()
    assert set(re.findall(r"--master-port (\d+)", starts)) == {"20287", "20288", "20289", "20290"}


@pytest.mark.parametrize("failure", ["CONFIG", "DATA", "MISSING_LIBRARY", "SCHEDULE"])
def test_a_failure_that_would_repeat_ends_the_job_at_once(failure, start_job, tmp_path):
    job = start_job(f"""echo '{{"class": "{failure}"}}' >failure.json; exit 1""")
    assert job.wait(30) == 1
    assert "would fail again" in (tmp_path / "log").read_text()
    assert len((tmp_path / "starts").read_text().splitlines()) == 2


def test_no_training_starts_on_nodes_that_fail_their_check(start_job, tmp_path):
    assert start_job("exit 0", CHECK="1").wait(30) == 1
    assert not (tmp_path / "starts").exists()


SAVES = """
trap 'trap "" TERM; echo saved >>saves; rm torchrun-$$; exit 1' TERM
echo $$ >torchrun-$$
for n in $(seq 6000); do "$REAL_SLEEP" 0.01; done"""


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(("restarts", "is_requeued"), [("3", True), ("100", False)])
def test_before_the_time_limit_or_at_a_preemption_the_run_saves_and_the_job_is_requeued(
    sent, restarts, is_requeued, start_job, tmp_path
):
    job = start_job(SAVES, SLURM_RESTART_COUNT=restarts)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("torchrun-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    job.send_signal(sent)
    job.wait(30)
    assert (tmp_path / "saves").read_text() == "saved\nsaved\n"
    assert (tmp_path / "requeued").exists() is is_requeued
    assert len((tmp_path / "starts").read_text().splitlines()) == 2


# Images and scripts ------------------------------------------------------------------------------


def test_shell_scripts_parse():
    scripts = [*(REPOSITORY / "examples").glob("**/*.sh"), SBATCH]
    for script in [*scripts, *(REPOSITORY / "tools").glob("*.sh")]:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


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
