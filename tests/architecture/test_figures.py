"""Bounds of what the figures count: none of them grows."""

import re
from pathlib import Path

import pytest

from megatron_lattice.deepspeed.reading import key_at
from tests.architecture.figures import (
    FIGURES,
    SMALL_WITH_REASON,
    any_parameters,
    deepspeed_keys,
    public_parameters,
    small_modules,
    tensor_functions,
)
from tests.architecture.ignored_arguments import ignored_arguments
from tests.architecture.parameters import unread

BOUNDS = {
    "settings declared twice": 0,
    "untyped reads of settings": 0,
    "module state": 12,
    "files with collectives": 6,
    "device branches": 3,
    "unread parameters": 0,
    "asserts on arguments": 0,
    "import circles": 0,
    "long files": 0,
    "crumbs": 6,
}
"""Figure -> how many places it may count. A bound only falls."""


@pytest.mark.parametrize("name", BOUNDS)
def test_a_figure_stays_within_its_bound(name):
    places = list(FIGURES[name]())
    listing = "\n".join(places)
    assert len(places) <= BOUNDS[name], f"{len(places)} > {BOUNDS[name]}:\n{listing}"


def test_few_public_parameters_take_anything():
    share = len(list(any_parameters())) / len(list(public_parameters()))
    assert share <= 0.03


def test_tensor_functions_give_shapes():
    shapes = [has_shape for _, has_shape in tensor_functions()]
    assert sum(shapes) / len(shapes) >= 0.98


def test_the_table_of_accepted_parameters_holds_what_is_unread_and_nothing_else():
    found = {(function, name) for _, function, name in unread()}
    stale = sorted(set(ignored_arguments()) - found)
    assert not stale, "\n".join(f"{function} {name}" for function, name in stale)


def test_the_small_modules_that_have_a_reason_are_small_modules():
    assert set(SMALL_WITH_REASON) <= {path for path, _ in small_modules()}


def test_the_tour_names_every_module_state():
    tour = Path("docs/architecture.md").read_text()
    named = set(re.findall(r"^\| `(\S+\.py) (\w+)` \|", tour, flags=re.MULTILINE))
    places = (place.split(" ") for place in FIGURES["module state"]())
    found = {(path.split(":")[0].removeprefix("megatron/"), name) for path, name in places}
    assert named == found


def test_the_keys_that_are_read_of_deepspeeds_json_are_declared():
    for key in deepspeed_keys():
        key_at(key)


def test_scripts_import_the_installed_package():
    """No script adds folders to the import path; a folder that is run replaces its own entry, and
    the peer's process lets megatron-core take the place of our package."""
    root = Path(__file__).resolve().parents[2]
    tops = ("tools", "benchmarks", "examples")
    scripts = [path for top in tops for path in (root / top).rglob("*.py")]
    assert len(scripts) > 40
    patched = {str(p.relative_to(root)) for p in scripts if "sys.path" in p.read_text()}
    assert patched == {"tools/checkpoint/__main__.py", "benchmarks/gpu/peers.py"}


OWN_PARSERS = {
    "megatron/core/settings/command_line.py": "the mechanism of tools: dataclasses become flags",
    "megatron/training/cli/parser.py": "that of training: it reports every problem at once",
    "megatron/training/cli/help.py": "prints the help of that",
    "megatron_lattice/deepspeed/initialize.py": "adds to the parser of a DeepSpeed script",
    "benchmarks/gpu/peers.py": "measures a peer whose package has the name of ours",
    "tools/constraints_beside.py": "makes the environment, before the package is installed",
    "tools/gpu_session.py": "starts where torch may fail to import",
    "tools/lowest_versions.py": "makes the environment, before the package is installed",
    "tools/slim_cuda_library.py": "repairs what torch imports",
    "examples/deepspeed/train.py": "is a DeepSpeed script as its users write them",
    "examples/run_simple_mcore_train_loop.py": "shows the library in a script of somebody else",
    "examples/quickstart/quickstart.py": "runs where the package is installed a moment later",
    "tests/parity/interop_peer.py": "runs beside Megatron-LM, without this package",
    "tests/parity/interop_deepspeed_peer.py": "runs beside DeepSpeed, without this package",
    "tests/parity/deepspeed_engine_job.py": "is a DeepSpeed script, run with both engines",
}
"""Files that use argparse, but for the names of its values -> why."""


DECLARES_FLAGS = re.compile(
    r"\.add_argument\(|ArgumentParser\("
    r"|^import argparse\b|^from argparse import (?!(Namespace|REMAINDER)$)",
    re.MULTILINE,
)


def test_flags_are_declared_by_dataclasses():
    root = Path(__file__).resolve().parents[2]
    tops = ("megatron", "megatron_lattice", "tools", "benchmarks", "examples", "tests")
    files = [*root.glob("*.py"), *(file for top in tops for file in (root / top).rglob("*.py"))]
    texts = {str(file.relative_to(root)): file.read_text() for file in files}
    found = {
        name for name, text in texts.items() if DECLARES_FLAGS.search(text) and "/test_" not in name
    }
    assert found == set(OWN_PARSERS)
