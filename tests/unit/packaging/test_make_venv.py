"""tools/make_venv.sh and `make clean` delete what they made, and nothing else."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.harness.pool import REPOSITORY

INTERPRETER = """#!/bin/sh
# Answers like an interpreter of some version whose pip installs nothing.
case "$1 $2" in
"-VV "*) echo "{version}" ;;
"-m venv")
    [ "{version}" != broken ] || exit 1
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
"-m pip") echo "what pip said"; [ "{version}" != offline ] || exit 1 ;;
"-c import hashlib"*) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """What the script reads of the repository, in a folder of its own."""
    (tmp_path / "project/tools").mkdir(parents=True)
    for name in ("tools/make_venv.sh", "Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(REPOSITORY / name, tmp_path / "project" / name)
    shutil.copytree(
        REPOSITORY / "megatron",
        tmp_path / "project/megatron",
        ignore=shutil.ignore_patterns("*.py"),
    )
    return tmp_path / "project"


def make(project, directory, version="Python 3", *, expect=0):
    interpreter = project.parent / "interpreter"
    interpreter.write_text(INTERPRETER.format(version=version, python=sys.executable))
    interpreter.chmod(0o755)
    return run(project, "tools/make_venv.sh", directory, "dev", expect=expect,
               environment={"PYTHON": str(interpreter)})  # fmt: skip


def run(project, *command, expect=0, environment=()):
    done = subprocess.run(
        command, cwd=project, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, **dict(environment)},
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def files(directory):
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.mark.parametrize("name", ["thesis.txt", "pyvenv.cfg", "bin/python"])
def test_a_directory_that_was_not_made_here_stays_as_it_is(project, name):
    precious = project.parent / "precious"
    (precious / name).parent.mkdir(parents=True)
    (precious / name).write_text("years of work")
    for directory in (precious, f"{precious}/", "../precious"):
        assert "another directory" in make(project, directory, expect=1)
        assert "another directory" in run(project, "make", "clean", f"VENV={directory}", expect=2)
    assert (precious / name).read_text() == "years of work"
    (project / "file").write_text("years of work")
    make(project, "file", expect=1)
    assert (project / "file").read_text() == "years of work"


def test_clean_does_not_split_a_name_with_a_blank(project):
    (project / "my work").mkdir()
    (project / "my").mkdir()
    (project / "my/thesis.txt").write_text("years of work")
    run(project, "make", "clean", "VENV=my work")
    assert files(project / "my") == {"thesis.txt"}


@pytest.mark.parametrize("exists", [False, True])
def test_an_environment_is_made_refreshed_and_removed(project, exists):
    directory = project.parent / "environment"
    if exists:
        directory.mkdir()
    make(project, directory)
    made = files(directory)
    assert {"pyvenv.cfg", ".made-from", "install.log"} <= made
    assert make(project, directory) == ""  # it is as it should be
    (directory / ".made-from").unlink()  # as after an installation that failed
    make(project, directory)
    assert files(directory) == made
    run(project, "make", "clean", f"VENV={directory}")
    assert not directory.exists()
    run(project, "make", "clean", f"VENV={directory}")


@pytest.mark.parametrize("failure", ["broken", "offline"])
def test_the_former_environment_comes_back_when_another_python_cannot_make_one(project, failure):
    directory = project / ".venv"
    make(project, directory)
    made = files(directory)
    assert "is restored" in make(project, directory, failure, expect=1)
    assert files(directory) == made
    assert not (project / ".venv.former").exists()
    make(project, directory, "Python 4")
    assert not (project / ".venv.former").exists()
    assert "Python 4" in (directory / "bin/python").read_text()


def test_an_environment_that_was_being_made_when_the_machine_went_down_is_made_again(project):
    directory = project / ".venv"
    make(project, directory)
    directory.rename(project / ".venv.former")
    directory.mkdir()
    (directory / ".made-by-lattice").touch()
    (directory / "half").touch()
    make(project, directory)
    assert not (directory / "half").exists()
    assert not (project / ".venv.former").exists()
