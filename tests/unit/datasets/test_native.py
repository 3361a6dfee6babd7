"""The compiled part: used only if it belongs to its source, and inside its arrays on any input."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import native
from tests.unit.datasets.conftest import HAS_COMPILER, compiled_here

ROOT = Path(__file__).parents[3]
WITH_COMPILER = [pytest.param(None, id="compiled")] if HAS_COMPILER else []
HUGE = [2**63 - 1, 2**63 - 9, 2**62, -(2**63), -2, 1 << 40, 1 << 31]


def sample(changed: dict[str, int]) -> tuple:
    """Arguments of `gather`: ten tokens of one document, and a second one of five."""
    values = {"pointer": 0, "length": 10, "order": 0, "first": 0, "offset": 0, "last": 0, "end": 9}
    values |= {"extra": 1, "idx": 0, "code": 8} | changed
    return (
        np.arange(15, dtype=np.uint16), values["code"],
        np.array([values["pointer"], 20], np.int64),
        np.array([np.int64(values["length"]).astype(np.int32), 5], np.int32),
        np.array([0, 1], np.int32),
        np.array([values["first"], values["offset"], values["last"], values["end"]], np.int64), 1,
        np.array([values["order"]], np.int64), 1, values["idx"], values["extra"], -1,
        np.zeros(10, np.int64),
    )  # fmt: skip


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("field", ["pointer", "order", "first", "offset", "last", "end", "extra"])
@pytest.mark.parametrize("_", WITH_COMPILER)
def test_values_near_the_ends_of_64_bits_do_not_pass_the_bounds_of_a_sample(_, field, value):
    with pytest.raises((IndexError, ValueError)):
        compiled_here().gather(*sample({field: value}))


@pytest.mark.parametrize("count", [1 << 60, 2**63 - 1, -1, -(2**63), 5])
@pytest.mark.parametrize("_", WITH_COMPILER)
def test_no_more_samples_are_written_than_fit(_, count):
    one, out = np.ones(4, np.int32), np.zeros((5, 2), np.int64)
    with pytest.raises(ValueError):
        compiled_here().sample_index(one, np.zeros(4, np.int32), 1, 1, True, out, count)
    compiled_here().sample_index(one, np.zeros(4, np.int32), 1, 1, True, out, 4)
    weights, counts, picks = np.ones(2), np.zeros(2), np.zeros(4, np.int16)
    with pytest.raises(ValueError):
        compiled_here().walk_blend(weights, None, 0, count, counts, picks)
    with pytest.raises(ValueError):
        compiled_here().walk_blend(weights, None, 2**63 - 1, 4, counts, picks)


@pytest.mark.parametrize("_", WITH_COMPILER)
def test_a_library_of_another_source_is_not_used_and_one_line_says_so(_, tmp_path):
    # As after `git pull` in an installed checkout: an older library beside a newer source.
    package = tmp_path / "megatron" / "core" / "datasets"
    shutil.copytree(ROOT / "megatron" / "core" / "datasets", package, ignore=_libraries)
    for folder in (
        "megatron/core",
        "megatron/core/foundation",
        "megatron",
        "megatron/compatibility",
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.tsv")]:
            shutil.copy(file, tmp_path / folder)
    look = (
        "from megatron.core.datasets import native, indexed_dataset;"
        "print(native.compiled is not None, native.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run():
        command = [sys.executable, "-c", look]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60
        )

    library = native.build(package)
    done = run()
    assert (done.stdout.split(), done.stderr) == (["True", str(package / "native.py")], "")
    source = package / "_native.c"
    source.write_text(source.read_text() + "/* changed */\n")
    done = run()
    assert done.stdout.split()[0] == "False", done.stderr
    assert done.stderr.count("compiled from another version of its source") == 1
    assert len(done.stderr.strip().splitlines()) == 1
    library.unlink()


def _libraries(folder, names):
    return [name for name in names if name.endswith(".so") or name == "__pycache__"]


def test_what_pip_compiles_is_marked_with_its_source(monkeypatch):
    marks = {}
    spec = importlib.util.spec_from_file_location("setup_of_this_project", ROOT / "setup.py")
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **options: marks.update(options))
    monkeypatch.chdir(ROOT)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    (extension,) = marks["ext_modules"]
    assert dict(extension.define_macros)["SOURCE_HASH"] == f'"{native.source_hash()}"'
    assert "megatron/core/datasets/_native.c" in (ROOT / "tools/make_venv.sh").read_text()


@pytest.mark.parametrize("_", WITH_COMPILER)
def test_random_arrays_show_no_fault_to_the_sanitizers(_, tmp_path):
    compiler = shlex.split(native.compiler())
    runtime = subprocess.run(
        [*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    flags = ["-O1", "-g", "-fno-sanitize-recover=all", "-fsanitize=address,undefined"]
    library = native.build(tmp_path, flags=flags)
    script = Path(__file__).with_name("fuzz_native.py")
    environment = {
        **os.environ, "LD_PRELOAD": runtime, "PYTHONPATH": str(ROOT),
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), str(library), "3000"],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "3000 cases" in done.stdout
