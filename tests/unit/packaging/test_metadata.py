"""pyproject.toml, the capabilities table and the constraints say the same."""

import importlib.metadata
import re
import sys

import pytest
from packaging.requirements import Requirement

from megatron.core.capabilities import BUILT_FROM_SOURCE, EXTRA_OF
from tests.harness.pool import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
DISTRIBUTION_OF = {"yaml": "pyyaml"}
"""Import name -> distribution name, where they differ."""


def names(requirements: list[str]) -> set[str]:
    return {Requirement(line).name.lower() for line in requirements}


@pytest.mark.parametrize("library", sorted(EXTRA_OF))
def test_the_extra_an_error_names_brings_the_library(library):
    distribution = DISTRIBUTION_OF.get(library, library)
    assert distribution in names(EXTRAS[EXTRA_OF[library]])


def test_the_library_itself_needs_torch_and_numpy_only():
    assert names(PYPROJECT["project"]["dependencies"]) == {"torch", "numpy"}


def test_no_extra_asks_for_what_is_built_from_source():
    asked = set().union(*(names(EXTRAS[extra]) for extra in EXTRAS if extra != "gpu"))
    assert not asked & set(BUILT_FROM_SOURCE)
    # The registry's package of that name is something else altogether.
    assert "apex" not in set().union(*map(names, EXTRAS.values()))


def test_constraints_pin_torch_for_every_python():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    torch = [Requirement(line) for line in lines if re.match(r"torch\b", line)]
    assert [str(requirement) for requirement in torch] == ["torch==2.13.0"]


def test_development_extra_is_pinned():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in lines if line and not line.startswith("#")])
    wanted = [Requirement(line) for extra in ("tokenizers", "hf", "logging", "config", "dev")
              for line in EXTRAS[extra]]  # fmt: skip
    needed = {r.name.lower() for r in wanted if r.marker is None or r.marker.evaluate()}
    assert needed - {"megatron-lattice"} <= pinned


def test_installed_version_is_the_declared_one():
    try:
        installed = importlib.metadata.version("megatron-lattice")
    except importlib.metadata.PackageNotFoundError:
        return  # used from a checkout on the path, without installing
    assert installed == PYPROJECT["project"]["version"]
