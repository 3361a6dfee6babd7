"""Specs: what is built from which description, and the messages when it cannot be."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import (
    ModuleSpec,
    build_module,
    describe_spec,
    get_module,
    get_submodules,
    import_module,
)


@dataclass
class Parts:
    inner: Any = None


class Outer(torch.nn.Module):
    def __init__(self, size: int, submodules: Parts, factor: float = 1.0) -> None:
        super().__init__()
        self.inner = build_module(submodules.inner, size, size)
        self.factor = factor


def plain_function(x):
    return x


def test_a_spec_builds_its_class_with_parts_and_parameters():
    spec = ModuleSpec(Outer, params={"factor": 3.0}, submodules=Parts(inner=("torch.nn", "Linear")))
    built = build_module(spec, 4)
    assert isinstance(built.inner, torch.nn.Linear)
    assert built.factor == 3.0
    assert not callable(spec), "a spec is data; callers tell it from a function that returns one"


def test_the_spec_wins_over_the_parent():
    spec = ModuleSpec(Outer, params={"factor": 3.0}, submodules=Parts(inner=IdentityOp))
    assert build_module(spec, 4, factor=7.0).factor == 3.0


@pytest.mark.parametrize("description", [torch.nn.Identity, ("torch.nn", "Identity")])
def test_classes_and_paths_need_no_spec(description):
    assert isinstance(build_module(description), torch.nn.Identity)
    assert get_module(description) is torch.nn.Identity


def test_functions_are_parts_that_are_called_not_built():
    assert build_module(plain_function, 1, 2) is plain_function
    assert build_module(ModuleSpec(plain_function)) is plain_function


def test_get_submodules_takes_a_spec_or_the_parts_themselves():
    parts = Parts(inner=IdentityOp)
    assert get_submodules(ModuleSpec(Outer, submodules=parts)) is parts
    assert get_submodules(parts) is parts


@pytest.mark.parametrize("path", [("torch.nn", "NoSuchLayer"), ("no_such_module", "X")])
def test_a_wrong_path_says_what_could_not_be_imported(path):
    with pytest.raises(ConfigError, match=path[1]):
        import_module(path)


def test_a_wrong_argument_names_the_class_and_its_parts():
    spec = ModuleSpec(Outer, params={"size_of_all": 3}, submodules=Parts(inner=IdentityOp))
    with pytest.raises(TypeError, match=r"size_of_all(.|\n)*building Outer(.|\n)*inner"):
        build_module(spec, 4)
    assert "inner: IdentityOp" in describe_spec(spec)


def test_identities_take_anything_and_give_back_the_first():
    assert IdentityOp(1, config=2)("x", 3, key=4) == "x"
    assert IdentityFuncOp()(True, False)("x", "residual", 0.1) == "x"
