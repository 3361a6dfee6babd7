"""pyproject.toml, the table of optional imports and the constraints say the same."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from megatron.core.foundation.optional_imports import BUILT_FROM_SOURCE, EXTRA_OF
from tests.harness.pool import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
DISTRIBUTION_OF = {
    "mlflow": "mlflow-skinny", "opentelemetry": "opentelemetry-sdk", "yaml": "pyyaml",
    "PIL": "pillow",
}  # fmt: skip
"""Import name -> distribution name, where they differ."""

FIRST_SAFE = {
    "starlette": ("0.49.1", "a Range header of a file response takes quadratic time"),
    "h11": ("0.16.0", "a chunk of a request may end in any two bytes: request smuggling"),
    "jinja2": ("3.1.6", "the filter attr reaches attributes that the sandbox hides"),
    "nltk": ("3.10.0", "CVE-2026-12261: a downloaded archive replaces files of other packages"),
    "orjson": ("3.9.15", "no limit of recursion while reading"),
    "pyarrow": ("14.0.1", "a type stored in a file is unpickled, and so executes it"),
    "ray": ("2.52.0", "a web page runs code through the dashboard"),
    "sentencepiece": ("0.2.3", "crashes while a made-up model is loaded"),
    "setuptools": ("78.1.1", "a package is written outside its folder"),
    "tiktoken": ("0.11.0", "a text that spells a special token becomes that token"),
    "torch": ("2.6.0", "CVE-2025-32434: torch.load executes files in spite of weights_only"),
    "tqdm": ("4.66.3", "arguments of its command are executed"),
}
"""Distribution -> the first release without the hole that is named.

A CVE is named where the release itself, or a library that asks for it, names that number.
"""


def names(requirements: list[str]) -> set[str]:
    return {Requirement(line).name.lower() for line in requirements}


@pytest.mark.parametrize("library", sorted(EXTRA_OF))
def test_the_extra_an_error_names_brings_the_library(library):
    distribution = DISTRIBUTION_OF.get(library, library)
    assert distribution in names(EXTRAS[EXTRA_OF[library]])


def test_the_library_itself_needs_torch_and_numpy_only():
    assert names(PYPROJECT["project"]["dependencies"]) == {"torch", "numpy"}


def lower_bounds() -> dict[str, Version]:
    """Return the lower bound of everything that is asked for, by distribution."""
    asked = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"]]
    found: dict[str, Version] = {}
    for line in [*asked, *(line for lines in EXTRAS.values() for line in lines)]:
        requirement = Requirement(line)
        for one in requirement.specifier:
            assert one.operator == ">=", line
            found[requirement.name.lower()] = Version(one.version)
    return found


@pytest.mark.parametrize("distribution", sorted(FIRST_SAFE))
def test_no_lower_bound_admits_a_release_with_a_known_hole(distribution):
    first, hole = FIRST_SAFE[distribution]
    assert lower_bounds()[distribution] >= Version(first), hole


def test_pinned_versions_are_within_the_bounds():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    bounds = lower_bounds()
    for line in lines:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            lowest = bounds.get(requirement.name.lower())
            assert lowest is None or Version(pin.version) >= lowest, line


def test_no_extra_asks_for_what_is_built_from_source():
    asked = set().union(*(names(EXTRAS[extra]) for extra in EXTRAS if extra != "gpu"))
    assert not asked & set(BUILT_FROM_SOURCE)
    # The registry's package of that name is something else altogether.
    assert "apex" not in set().union(*map(names, EXTRAS.values()))


def test_constraints_pin_torch_for_every_python():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    torch = [Requirement(line) for line in lines if re.match(r"torch\b", line)]
    assert [str(requirement) for requirement in torch] == ["torch==2.13.0"]


def test_an_image_with_pins_of_its_own_gets_the_rest_of_the_constraints(tmp_path):
    base = tmp_path / "base.txt"
    base.write_text("# NVIDIA's\nhuggingface-hub>=3\nPillow==1 ; x\n")
    ours = (REPOSITORY / "constraints.txt").read_text()
    command = [sys.executable, REPOSITORY / "tools/constraints_beside.py", "torch", base, ""]
    done = subprocess.run(command, input=ours, capture_output=True, text=True, check=True)
    left_out = set(ours.splitlines()) - set(done.stdout.splitlines())
    assert {line.split("==")[0] for line in left_out} == {"huggingface_hub", "pillow", "torch"}
    (install,) = re.findall(r"pip install (.*)", (REPOSITORY / "Dockerfile").read_text())
    assert install.endswith("-c beside.txt")


def test_development_extra_is_pinned():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in lines if line and not line.startswith("#")])
    wanted = [Requirement(line) for extra in ("tokenizers", "hf", "logging", "config", "dev")
              for line in EXTRAS[extra]]  # fmt: skip
    needed = {r.name.lower() for r in wanted if r.marker is None or r.marker.evaluate()}
    assert needed - {"megatron-lattice"} <= pinned


def test_an_editable_installation_is_an_entry_of_the_path():
    # Then another distribution's folder `megatron` (without __init__.py) cannot hide this package.
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {"": "."}


def test_installed_version_is_the_declared_one():
    try:
        installed = importlib.metadata.version("megatron-lattice")
    except importlib.metadata.PackageNotFoundError:
        return  # used from a checkout on the path, without installing
    assert installed == PYPROJECT["project"]["version"]
