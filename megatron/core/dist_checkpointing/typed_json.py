"""Plain values as JSON: decoding restores exactly the same values and executes nothing.

Numbers, strings, booleans, None, lists and string-keyed dicts are ordinary JSON (floats as their
shortest exact decimal). Other types are objects with one key, which begins with "$":

    {"$tuple": [...]}            {"$dict": [[key, value], ...]}   (other than string keys)
    {"$float": "nan"}            {"$bytes": base64}
    {"$namespace": {...}}        argparse.Namespace
    {"$dtype": "float32"}        torch.dtype
    {"$array": [dtype, shape, base64]}    numpy array, {"$scalar": [dtype, base64]} numpy scalar
    {"$tensor": [dtype, shape, base64]}   small torch tensor

An enum is stored as the name of its member, a path as its text. Anything else is refused by name.
"""

from __future__ import annotations

import base64
import enum
import json
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.tree import Path, show_path
from megatron.core.foundation.errors import CheckpointError, shown

MAX_TENSOR_BYTES = 1 << 20
"""Larger tensors are weights or optimizer state, and belong in a `ShardedTensor`."""

_TORCH_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NUMPY_KINDS = "biufc"
_MAX_DEPTH = 200


def encode(value: object, *, where: str = "state") -> Any:
    """Return the JSON form of a value.

    Raises:
        CheckpointError: a part of it cannot be stored; the message names its key and type.
    """
    return _encode(value, (where,))


def _encode(value: Any, path: Path) -> Any:
    if len(path) > _MAX_DEPTH:
        raise _refused(value, path, f"it is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, str)):
        return value
    # Exact types: numpy's float64 is a float, and must be restored as numpy's float64.
    if type(value) is int or (isinstance(value, int) and not isinstance(value, np.generic)):
        return int(value)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, (*path, i)) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, (*path, i)) for i, item in enumerate(value)]
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, (*path, key)) for key, item in value.items()}
        pairs = [
            [_encode(key, (*path, "key")), _encode(item, (*path, key))]
            for key, item in value.items()
        ]
        return {"$dict": pairs}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _text(bytes(value))}
    if isinstance(value, Namespace):
        fields = {key: _encode(item, (*path, key)) for key, item in vars(value).items()}
        return {"$namespace": fields}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (np.generic, np.ndarray)):
        return _encode_numpy(value, path)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path)
    raise _refused(value, path, "only plain values are stored: nothing in a checkpoint is code")


def _encode_numpy(value: np.generic | np.ndarray, path: Path) -> Any:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise _refused(value, path, f"numpy dtype {value.dtype} is not a number")
    if value.nbytes > MAX_TENSOR_BYTES:
        raise _refused(value, path, f"{value.nbytes} bytes is too large for metadata")
    little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
    if isinstance(value, np.generic):
        return {"$scalar": [value.dtype.name, _text(little.tobytes())]}
    return {"$array": [value.dtype.name, list(value.shape), _text(little.tobytes())]}


def _encode_tensor(value: torch.Tensor, path: Path) -> Any:
    if value.numel() * value.element_size() > MAX_TENSOR_BYTES:
        raise _refused(
            value, path, "a tensor above 1 MiB must be declared as a ShardedTensor to be saved"
        )
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    name = str(value.dtype).removeprefix("torch.")
    return {"$tensor": [name, list(value.shape), _text(data)]}


def decode(value: object) -> Any:
    """Return the value of a JSON form made by `encode`.

    Raises:
        DamagedCheckpointError: the form is not one that `encode` makes.
    """
    try:
        return _decode(value)
    except RecursionError as error:
        raise _malformed("nested too deeply") from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            (tag, content) = next(iter(value.items()))
            if tag.startswith("$"):
                return _decode_tagged(tag, content)
        if any(key.startswith("$") for key in value):
            raise _malformed(value)
        return {key: _decode(item) for key, item in value.items()}
    return value


def _decode_tagged(tag: str, content: Any) -> Any:
    maker = _MAKERS.get(tag)
    if maker is None:
        raise _malformed({tag: content})
    try:
        return maker(content)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise _malformed({tag: content}) from error


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)


def _make_array(content: Any) -> np.ndarray:
    name, shape, text = content
    dtype: np.dtype = np.dtype(str(name)).newbyteorder("<")
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(name)
    flat = np.frombuffer(_bytes(text), dtype=dtype).astype(dtype.newbyteorder("="))
    return flat.reshape(_checked_shape(shape, flat.size))


def _make_tensor(content: Any) -> torch.Tensor:
    name, shape, text = content
    data, dtype = bytearray(_bytes(text)), _TORCH_DTYPES[name]
    if not data:
        return torch.empty(_checked_shape(shape, 0), dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.reshape(_checked_shape(shape, flat.numel()))


def _checked_shape(shape: Any, count: int) -> tuple[int, ...]:
    if len(shape) > 64 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise ValueError("not a shape")
    if math.prod(shape) != count:
        raise ValueError(f"{count} elements")
    return tuple(shape)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(_decode(list(items))),
    "$dict": lambda pairs: {_decode(key): _decode(item) for key, item in pairs},
    "$float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "$bytes": _bytes,
    "$namespace": lambda fields: Namespace(**{k: _decode(v) for k, v in fields.items()}),
    "$dtype": lambda name: _TORCH_DTYPES[name],
    "$array": _make_array,
    "$scalar": lambda content: _make_array([content[0], [1], *content[1:]])[0],
    "$tensor": _make_tensor,
}


def dump_bytes(tree: object) -> bytes:
    """Return the JSON form as ASCII text; equal forms give equal bytes."""
    return json.dumps(tree, allow_nan=False, separators=(",", ":")).encode("ascii")


def parse_bytes(data: bytes, *, what: str) -> Any:
    """Parse strict JSON: no repeated keys, no NaN literal, limited nesting.

    Raises:
        DamagedCheckpointError: naming `what` (a path).
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{what} is not valid JSON: {str(error)[:200] or type(error).__name__}.",
            rule="metadata is strict JSON in UTF-8",
            fix="the file is damaged or not ours: use another checkpoint",
        ) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is repeated")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _refused(value: Any, path: Path, why: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return CheckpointError(
        f"{show_path(path)} is a {kind} and cannot be stored: {why}.",
        rule="checkpoints hold tensors and plain values (numbers, text, lists, dicts, bytes)",
        fix="store its plain contents instead, or wrap it in LocalNonpersistentObject",
    )


def _malformed(tree: object) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"a stored value has a form that is not ours: {shown(tree, 120)}",
        rule="typed JSON has a fixed set of types",
    )
