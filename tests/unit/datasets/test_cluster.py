"""The same shards whatever runs them: datatrove's executors, array tasks, one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import merge_datasets, preprocess_on_cluster

ROOT = Path(__file__).parents[3]
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "0", "--append-eod"]

SBATCH = """#!{python}
# A scheduler of one machine: runs each task of the array at once, as `sbatch` would one day.
import os, re, subprocess, sys
script = sys.argv[-1]
text = open(script).read()
first, last = re.search(r"--array=(\\d+)-(\\d+)", text).groups()
for task in range(int(first), int(last) + 1):
    environment = {{**os.environ, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": "7",
                    "SLURM_ARRAY_JOB_ID": "7", "SLURM_NODEID": "0", "RUN_OFFSET": "0",
                    "SLURM_NODELIST": "node1"}}
    done = subprocess.run(["bash", script], env=environment)
    assert done.returncode == 0, done
print("Submitted batch job 7")
"""
SCONTROL = "#!/bin/bash\necho node1\n"
SRUN = """#!/bin/bash
while [[ $1 != launch_pickled_pipeline ]]; do shift; done
exec "$@"
"""


@pytest.fixture
def corpus(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * (i % 9)}) for i in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return tmp_path


def flags(corpus, output):
    return ["--input", str(corpus / "in.jsonl"), "--output-prefix", str(corpus / output), *BYTES]


def tool(corpus, output, *more, environment=None):
    return subprocess.run(
        [sys.executable, "tools/preprocess_data.py", *flags(corpus, output), *more],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def shards(corpus, output, count):
    names = [f"{output}-{i:05d}-of-{count:05d}_text_document" for i in range(count)]
    return [(corpus / f"{name}{end}").read_bytes() for name in names for end in (".bin", ".idx")]


@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_an_executor_writes_the_shards_of_one_process(corpus, executor):
    (corpus / "bin").mkdir()
    commands = {"sbatch": SBATCH.format(python=sys.executable), "srun": SRUN, "scontrol": SCONTROL}
    for name, text in commands.items():
        (corpus / "bin" / name).write_text(text)
        (corpus / "bin" / name).chmod(0o755)
    more = ["--partition", "cpu", "--qos", "normal"] if executor == "slurm" else []
    path = [str(corpus / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    done = subprocess.run(
        [sys.executable, "tools/preprocess_on_cluster.py", "--executor", executor, "--tasks", "2",
         "--logging-dir", str(corpus / "logs"), *more, "--", *flags(corpus, "many")],
        env={**os.environ, "PATH": os.pathsep.join(path), "HOME": str(corpus)},
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert tool(corpus, "one", "--num-shards", "2").returncode == 0
    assert shards(corpus, "many", 2) == shards(corpus, "one", 2)


def test_array_tasks_of_which_one_is_run_again_equal_one_run(corpus):
    for task in (2, 0, 1):
        more = ["--num-shards", "3"]
        if task == 1:  # dies at its first line; its output must not appear
            content = (corpus / "in.jsonl").read_bytes()
            assert len(content) > 9000
            (corpus / "in.jsonl").write_bytes(
                content.replace(b"document 120 ", b"document\x00120 ")
            )
            environment = {"SLURM_ARRAY_TASK_ID": "1"}
            assert tool(corpus, "array", *more, environment=environment).returncode == 1
            assert not (corpus / "array-00001-of-00003_text_document.bin").exists()
            (corpus / "in.jsonl").write_bytes(content)
        done = tool(corpus, "array", *more, environment={"SLURM_ARRAY_TASK_ID": str(task)})
        assert done.returncode == 0, done.stderr
    merge = ["--input", *(f"{corpus}/array-{i:05d}-of-00003_text_document" for i in range(3))]
    assert merge_datasets.main([*merge, "--output-prefix", str(corpus / "joined")]) == 0
    assert tool(corpus, "whole").returncode == 0
    for end in (".bin", ".idx"):
        whole = (corpus / f"whole_text_document{end}").read_bytes()
        assert (corpus / f"joined{end}").read_bytes() == whole


def test_a_task_that_fails_fails_the_run_and_says_why(corpus):
    (corpus / "in.jsonl").write_text('{"text": "a"}\nnot JSON\n')
    done = subprocess.run(
        [sys.executable, "tools/preprocess_on_cluster.py", "--executor", "local", "--tasks", "1",
         "--logging-dir", str(corpus / "logs"), "--", *flags(corpus, "many")],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1
    assert "in.jsonl, line 2: not JSON" in done.stderr


@pytest.mark.parametrize(("missing", "status"), [([], 0), ([1], 1)])
def test_a_run_on_ray_ends_well_only_with_all_shards(monkeypatch, capsys, missing, status):
    # datatrove logs the failed tasks and returns.
    executor = SimpleNamespace(run=list, world_size=2, get_incomplete_ranks=lambda: missing)
    monkeypatch.setattr(preprocess_on_cluster, "make_executor", lambda args: executor)
    command = ["--executor", "ray", "--tasks", "2", "--logging-dir", "x", "--", "--input", "y"]
    assert preprocess_on_cluster.main(command) == status
    assert ("1 of 2 tasks did not finish (1)" in capsys.readouterr().err) == bool(missing)


@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        (["--executor", "slurm", "--tasks", "64", "--cpus-per-task", "8"], "8"),
        (["--executor", "local", "--tasks", "8", "--at-once", "2"], "6"),
        (["--executor", "local", "--tasks", "3"], "4"),
        (["--executor", "local", "--tasks", "50"], "1"),
    ],
)
def test_the_tasks_of_a_machine_share_its_cores(monkeypatch, flags, workers):
    monkeypatch.setattr(preprocess_on_cluster, "usable_cores", lambda: 12)
    args = preprocess_on_cluster.parse_args([*flags, "--logging-dir", "x", "--", "--input", "y"])
    assert preprocess_on_cluster.workers_of(args) == ["--workers", workers]


def test_flags_that_the_tasks_decide_are_refused(capsys):
    command = ["--executor", "local", "--tasks", "2", "--logging-dir", "x", "--"]
    assert preprocess_on_cluster.main([*command, "--rank", "1"]) == 2
    assert "each task sets its own shard" in capsys.readouterr().err
    command[1] = "slurm"
    assert preprocess_on_cluster.main([*command, "--input", "x"]) == 2
    assert "--partition" in capsys.readouterr().err
