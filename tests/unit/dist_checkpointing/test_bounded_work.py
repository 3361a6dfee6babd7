"""What a hostile file makes its reader do is bounded: proofs of coverage, shapes, messages."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import typed_json
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.flat_ranges import Box, coverage_problem
from megatron.core.foundation.errors import CheckpointError, shown
from megatron.hugging_face.model_directory import tensors_of_file


def pinwheels(depth: int) -> tuple[tuple[int, int], list[Box]]:
    """Four boxes around a smaller square, in which four boxes are, and so on: no axis cuts them."""
    side = 3 * depth
    boxes: list[Box] = []
    for ring in range(depth):
        low, length = ring, side - 2 * ring
        high = low + length - 1
        boxes += [
            ((low, low), (1, length - 1)), ((low, high), (length - 1, 1)),
            ((high, low + 1), (1, length - 1)), ((low + 1, low), (length - 1, 1)),
        ]  # fmt: skip
    inner = side - 2 * depth
    boxes.append(((depth, depth), (inner, inner)))
    return (side, side), boxes


def guillotine(count: int) -> tuple[tuple[int, int], list[Box]]:
    """Boxes that are cut off one by one, by turns along both axes."""
    half = count // 2
    boxes: list[Box] = []
    for i in range(half):
        boxes += [((i, i), (1, half - i)), ((i + 1, i), (half - i - 1, 1))]
    return (half, half), [box for box in boxes if 0 not in box[1]]


def test_few_irregular_boxes_are_proven_to_cover_a_tensor() -> None:
    for shape, boxes in (pinwheels(20), guillotine(100)):
        assert coverage_problem(shape, boxes) is None
        assert "overlap" in str(coverage_problem(shape, [*boxes, boxes[7]]))


@pytest.mark.parametrize("make", [lambda: pinwheels(5_000), lambda: guillotine(20_000)])
def test_the_proof_of_coverage_ends_soon_whatever_the_boxes(make: Any) -> None:
    shape, boxes = make()
    began = time.process_time()
    assert "too irregular" in str(coverage_problem(shape, boxes))
    assert time.process_time() - began < 10


def test_a_fine_grid_of_boxes_is_proven_to_cover_a_tensor() -> None:
    boxes: list[Box] = [
        ((i, 2 * j, 2 * k), (1, 2, 2)) for i in range(60) for j in range(20) for k in range(20)
    ]
    assert coverage_problem((60, 40, 40), boxes) is None


def deep(levels: int) -> tuple[Any, ...]:
    """A tuple that is a tree of 2^levels parts."""
    value: tuple[Any, ...] = ()
    for _ in range(levels):
        value = (value, value)
    return value


class Unfriendly:
    """Its text is never asked for."""

    def __repr__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"), (True, "True"), (0.5, "0.5"), (12, "12"), ("a\n", "'a\\n'"),
        (b"\0", "b'\\x00'"), ((1,), "(1,)"), ([1, "x"], "[1, 'x']"), ({"a": 1}, "{'a': 1}"),
        (list(range(10)), "[0, 1, 2, 3, ... 10 in all]"), (1 << 1000, "an integer of 1001 bits"),
        (Unfriendly(), "<Unfriendly>"), ([[[1]]], "[[<list of 1>]]"),
    ],
)  # fmt: skip
def test_values_of_a_file_are_shown_shortly(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value", [deep(60), "x" * 10_000_000, [["y" * 10_000_000] * 9] * 9, {deep(9): deep(60)}]
)
def test_showing_a_hostile_value_is_cheap(value: Any) -> None:
    began = time.process_time()
    assert len(shown(value, 80)) <= 83
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize("size", [1, 0, (1 << 62)])
def test_shapes_of_any_length_are_refused_at_once(size: int, tmp_path: Path) -> None:
    shape = [size] * 300_000
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        tensors_of_file(path)
    with pytest.raises(DamagedCheckpointError):
        typed_json.decode({"$tensor": ["float32", shape, ""]})
    assert time.process_time() - began < 1
    assert len(str(caught.value)) < 1000


def test_tensors_of_a_safetensors_file_do_not_share_bytes(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(CheckpointError, match="'a' and 'b' overlap"):
        tensors_of_file(path)
