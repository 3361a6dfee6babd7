"""Plain values come back as exactly what they were."""

import argparse
import collections
import enum
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.typed_json import decode, dump_bytes, encode, parse_bytes
from megatron.core.foundation.errors import CheckpointError


def round_trip(value):
    return decode(parse_bytes(dump_bytes(encode(value)), what="test"))


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def identical(a, b) -> bool:
    """Equal in type and bits, through containers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return identical(list(a.keys()), list(b.keys())) and all(
            identical(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    return a == b


@given(trees)
@settings(max_examples=100, deadline=None)
def test_plain_values_come_back_identical_in_type_and_bits(value) -> None:
    assert identical(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64(-0.0),
        np.int64(-5),
        np.bool_(True),
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.zeros((0, 4)),
        np.array(3.5),
    ],
    ids=repr,
)
def test_numpy_values_keep_dtype_and_shape(value) -> None:
    found = round_trip(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert np.array_equal(found, value)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.5),
        torch.arange(4, dtype=torch.uint8),
        torch.randn(2, 3).bfloat16(),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.get_rng_state(),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)
def test_small_tensors_keep_dtype_and_shape(value) -> None:
    found = round_trip(value)
    assert found.dtype == value.dtype
    assert torch.equal(found, value)


def test_the_states_of_random_generators_come_back(monkeypatch) -> None:
    import random

    state, numpy_state = random.getstate(), np.random.get_state()
    wanted = (random.random(), np.random.rand())
    random.setstate(round_trip(state))
    np.random.set_state(round_trip(numpy_state))
    assert (random.random(), np.random.rand()) == wanted


class Colour(enum.Enum):
    RED = 1


def test_other_values_have_a_plain_form() -> None:
    assert round_trip(Colour.RED) == "RED"
    assert round_trip(Path("/a/b")) == "/a/b"
    assert round_trip(torch.bfloat16) is torch.bfloat16
    assert round_trip(argparse.Namespace(a=1, b=(2,))) == argparse.Namespace(a=1, b=(2,))
    assert round_trip(collections.OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert round_trip({"$tuple": [1]}) == {"$tuple": [1]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, {"f": len}]}, r"state\.a\[1\]\.f is a builtins\.builtin_function"),
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (torch.zeros(1 << 20), "above 1 MiB must be declared as a ShardedTensor"),
        (np.array([object()]), "numpy dtype object"),
        (1j, "builtins.complex"),
    ],
    ids=["function", "set", "object", "large tensor", "array of objects", "complex"],
)
def test_what_cannot_be_stored_is_refused_by_place_and_type(value, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        encode(value)


def test_endless_nesting_is_refused() -> None:
    value: list = []
    value.append(value)
    with pytest.raises(CheckpointError, match="nested deeper"):
        encode(value)
