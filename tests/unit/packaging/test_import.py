"""What importing the library brings in, and what it costs."""

import importlib
import json
import os
import pkgutil
import resource
import subprocess
import sys

import pytest

import megatron
from megatron.core.foundation.optional_imports import BUILT_FROM_SOURCE, EXTRA_OF
from tests.harness.pool import REPOSITORY

CORE_IMPORT_BUDGET_S = 0.25

MEASURE = """
import json, os, sys
import torch, numpy
before = set(sys.modules)
used = lambda: sum(os.times()[:2])
start = used()
import megatron.core
seconds = used() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WRITTEN_IN_TRITON = "megatron.core.kernels.triton_kernels."
"""Modules that are imported when one of their kernels is chosen: never without Triton."""
OF_AN_EXTRA = ("megatron.inference.server",)
"""Modules that only a tool imports, which asks for the extra first."""


def public_modules() -> list[str]:
    names = [info.name for info in pkgutil.walk_packages(megatron.__path__, prefix="megatron.")]
    return [
        name
        for name in names
        if not any(p.startswith("_") for p in name.split("."))
        and not name.startswith(WRITTEN_IN_TRITON)
        and name not in OF_AN_EXTRA
    ]


def test_core_adds_less_than_a_quarter_second_and_no_optional_library_to_torch():
    report = json.loads(run_python(MEASURE))
    # Processor seconds: the machine may be busy with something else.
    assert report["seconds"] < CORE_IMPORT_BUDGET_S
    brought = {name.split(".")[0] for name in report["modules"]}
    assert not brought & (set(EXTRA_OF) | set(BUILT_FROM_SOURCE))


def test_every_public_module_imports_without_any_optional_library():
    # One process imports all, in which no optional library can be found.
    code = f"""
import importlib, sys
hidden = {sorted(set(EXTRA_OF) | set(BUILT_FROM_SOURCE))!r}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in hidden:
            return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in {public_modules()!r}:
    importlib.import_module(name)
"""
    run_python(code)


def test_public_names_exist():
    missing = []
    for name in public_modules():
        module = importlib.import_module(name)
        missing += [f"{name}.{n}" for n in getattr(module, "__all__", ()) if not hasattr(module, n)]
    assert not missing


def test_a_run_brings_in_neither_the_compiler_nor_tensors_of_torch(tmp_path):
    flags = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16
        --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 1 --train-iters 2
        --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --optimizer muon
        --eval-interval 1 --eval-iters 1"""
    code = f"""
import sys, pretrain_gpt
sys.argv = ["pretrain_gpt.py", *{flags.split()!r}, "--save", {str(tmp_path / "save")!r}]
pretrain_gpt.main()
print(sorted({{"torch._dynamo", "torch._inductor", "torch.distributed.tensor"}} & set(sys.modules)))
"""
    said = run_python(code)
    assert "successfully saved checkpoint from iteration       2" in said
    assert said.splitlines()[-1] == "[]"


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "tools/preprocess_data.py"])
def test_entry_points_answer_help_in_few_processor_seconds(script):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, script, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, so that other work on the machine does not count; 3 s are usual.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
