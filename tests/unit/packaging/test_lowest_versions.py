"""The lowest versions that are allowed can be named, so that somebody can test with them."""

import pytest
from packaging.version import Version

from tests.unit.packaging.test_metadata import EXTRAS, PYPROJECT, lower_bounds
from tools.lowest_versions import lowest_versions

PROJECT = PYPROJECT["project"]


def test_everything_but_torch_is_pinned_to_its_lower_bound():
    found = lowest_versions(PROJECT, [])
    bounds = lower_bounds()
    assert {name: Version(v) for name, v in found.items() if v} == {
        name: bounds[name.lower()] for name in found if found[name]
    }
    assert "torch" not in found and "numpy" in found
    # What is for developers, or comes with a CUDA build of torch, is no business of users.
    assert set(EXTRAS) >= {"dev", "gpu"} and "pytest" not in found and "triton" not in found


def test_some_extras_are_enough():
    assert set(lowest_versions(PROJECT, ["config"])) == {"numpy", "pyyaml"}


def test_a_requirement_of_another_form_is_refused():
    with pytest.raises(SystemExit, match="name>=version"):
        lowest_versions({"dependencies": ["numpy<3"], "optional-dependencies": {}}, ["x"][:0])
