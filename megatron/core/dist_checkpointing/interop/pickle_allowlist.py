"""The names that a pickle of torch, Megatron-LM or DeepSpeed may hold, and what stands for them.

Tensors become `StoredView`s, containers become plain ones, dtypes themselves, and everything else
an inert `Record`. Nothing here imports what a name says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.dist_checkpointing.interop.pickled_values import (
    AllowedGlobal,
    AttributeDict,
    OrderedEntries,
    Record,
    bound_collisions,
    is_key,
)
from megatron.core.dist_checkpointing.interop.stored_view import (
    MAX_DIMS,
    StoredBytes,
    StoredView,
)

_DTYPE_NAMES = (
    "float64", "double", "float32", "float", "float16", "half", "bfloat16", "int64", "long",
    "int32", "int", "int16", "short", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)  # fmt: skip
_STORAGE_TYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_DCP = "torch.distributed.checkpoint."
_DCP_RECORDS = {
    f"{_DCP}{module}": names
    for module, names in {
        "metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING", "StorageMeta",
        ),
        "filesystem": ("_StorageInfo", "_StoragePrefix"),
        "planner": (
            "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
        ),
    }.items()
}  # fmt: skip
_OWN_CLASSES = re.compile(
    r"(?:megatron|deepspeed|transformer_engine|apex|nvidia_resiliency_ext|modelopt|numpy)"
    r"(?:\.[A-Za-z_]\w*)* [A-Za-z_][\w.]*",
    re.ASCII,
)
"""Classes and enums of the programs that write checkpoints: data whose meaning is not needed."""
_MAX_TEXT = 1 << 12
_MAX_TEXT_PARTS = 64
_SIGNAL = re.compile(r"signal SIG[A-Z0-9]+", re.ASCII)


class StorageType:
    """Stands for a class of storages."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        """None for bytes whose tensors say their own dtype."""


class Storage:
    """A storage that a persistent id named."""

    def __init__(self, data: StoredBytes, dtype: torch.dtype | None) -> None:
        self.data, self.dtype = data, dtype


def lookup(name: str) -> AllowedGlobal | None:
    """Return what "module name" stands for, or None if it is not on the allowlist."""
    found = _TABLE.get(name)
    if found is not None:
        return found
    if _SIGNAL.fullmatch(name):
        return AllowedGlobal(name, value=name.split()[1])
    if _OWN_CLASSES.fullmatch(name):
        return _record(name)
    return None


def _record(name: str) -> AllowedGlobal:
    kind = name.replace(" ", ".")
    return AllowedGlobal(name, lambda arguments: Record(kind, arguments))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any = None) -> StoredView:
    if not isinstance(storage, Storage):
        raise TypeError("not a storage")
    dtype = storage.dtype if storage.dtype is not None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    if max(len(size), len(stride)) > MAX_DIMS:
        raise ValueError("too many dimensions")
    numbers = (offset, *size, *stride)
    if any(type(n) is not int or abs(n) >= 1 << 62 for n in numbers):
        raise TypeError("sizes are integers")
    view = StoredView(storage.data, dtype, tuple(size), tuple(stride), offset)
    problem = view.problem()
    if problem is not None:
        raise ValueError(problem)
    return view


def _rebuild_tensor_v2(arguments: tuple[Any, ...]) -> StoredView:
    storage, offset, size, stride = arguments[:4]
    return _tensor(storage, offset, size, stride)


def _rebuild_tensor_v3(arguments: tuple[Any, ...]) -> StoredView:
    storage, offset, size, stride = arguments[:4]
    return _tensor(storage, offset, size, stride, arguments[6])


def _rebuild_parameter(arguments: tuple[Any, ...]) -> StoredView:
    if not isinstance(arguments[0], StoredView):
        raise TypeError("not a tensor")
    return arguments[0]


def _rebuild_from_type(arguments: tuple[Any, ...]) -> Any:
    """A tensor with attributes: (function, class, arguments, attributes)."""
    function, kind, inner, _ = arguments
    if (
        kind is not _TENSOR_CLASS
        or not isinstance(function, AllowedGlobal)
        or type(inner) is not tuple
    ):
        raise TypeError("not a plain tensor")
    if function.make not in (_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_parameter):
        raise TypeError("not a plain tensor")
    return function.make(inner)


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    (sizes,) = arguments
    if any(type(n) is not int for n in sizes):
        raise TypeError("sizes are integers")
    return tuple(sizes)


def _text(arguments: tuple[Any, ...]) -> str:
    parts = [a for a in arguments if isinstance(a, (str, int))]
    if len(parts) > _MAX_TEXT_PARTS or any(
        (len(a) if isinstance(a, str) else a.bit_length()) > _MAX_TEXT for a in parts
    ):
        raise ValueError("a name of this length")
    text = "/".join(str(a) for a in parts)
    if len(text) > _MAX_TEXT:  # the result may be an argument again, and so on
        raise ValueError("a name of this length")
    return text


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    text, encoding = arguments
    if encoding not in ("latin1", "latin-1") or type(text) is not str:
        raise ValueError("another encoding")
    return text.encode("latin-1")


def _set_of(kind: Callable[[Any], Any]) -> Callable[[tuple[Any, ...]], Any]:
    def make(arguments: tuple[Any, ...]) -> Any:
        (items,) = arguments or ([],)
        if type(items) is not list or not all(is_key(item) for item in items):
            raise TypeError("a set of plain values is made from a list")
        found: set[Any] = set()
        for item in items:
            bound_collisions(found, item)
            found.add(item)
        return kind(found)

    return make


def _ordered(arguments: tuple[Any, ...]) -> OrderedEntries:
    entries = OrderedEntries()
    for key, value in arguments[0] if arguments else ():
        if not isinstance(key, (str, int)) or not is_key(key):
            raise TypeError("keys are names")
        bound_collisions(entries, key)
        entries[key] = value
    return entries


def _plain_bytes(arguments: tuple[Any, ...]) -> bytes:
    (data,) = arguments or (b"",)
    if type(data) is not bytes:
        raise TypeError("not bytes")
    return data


_TENSOR_CLASS = AllowedGlobal("torch Tensor")


def _build_table() -> dict[str, AllowedGlobal]:
    calls: dict[str, Callable[[tuple[Any, ...]], Any]] = {
        "torch._utils _rebuild_tensor": _rebuild_tensor_v2,
        "torch._utils _rebuild_tensor_v2": _rebuild_tensor_v2,
        "torch._utils _rebuild_tensor_v3": _rebuild_tensor_v3,
        "torch._utils _rebuild_parameter": _rebuild_parameter,
        "torch._utils _rebuild_parameter_with_state": _rebuild_parameter,
        "torch._tensor _rebuild_from_type_v2": _rebuild_from_type,
        "torch Size": _size,
        "torch device": _text,
        "torch.serialization _get_layout": _text,
        "collections OrderedDict": _ordered,
        "collections defaultdict": lambda arguments: OrderedEntries(),
        "argparse Namespace": lambda arguments: AttributeDict(),
        "types SimpleNamespace": lambda arguments: AttributeDict(),
        "_codecs encode": _encoded,
    }
    for module in ("builtins", "__builtin__"):
        calls |= {
            f"{module} set": _set_of(set),
            f"{module} frozenset": _set_of(frozenset),
            f"{module} bytearray": _plain_bytes,
            f"{module} bytes": _plain_bytes,
        }
    for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
        calls |= {f"pathlib {kind}": _text, f"pathlib._local {kind}": _text}
    table = {name: AllowedGlobal(name, make) for name, make in calls.items()}
    for module in ("builtins", "__builtin__"):  # names only: factories of a defaultdict
        for kind in ("dict", "list", "int", "float", "str", "bool", "tuple"):
            table[f"{module} {kind}"] = AllowedGlobal(f"{module} {kind}")
    for name in _DTYPE_NAMES:
        table[f"torch {name}"] = AllowedGlobal(name, value=getattr(torch, name))
    for name, dtype in _STORAGE_TYPES.items():
        table[f"torch {name}"] = AllowedGlobal(name, value=StorageType(dtype))
    for name in ("UntypedStorage", "_UntypedStorage"):
        table[f"torch.storage {name}"] = AllowedGlobal(name, value=StorageType(None))
    for module, names in _DCP_RECORDS.items():
        table |= {f"{module} {name}": _record(f"{module} {name}") for name in names}
    for layout in ("strided", "contiguous_format", "preserve_format"):
        table[f"torch {layout}"] = AllowedGlobal(layout, value=layout)
    return table | {"torch Tensor": _TENSOR_CLASS, "torch.nn.parameter Parameter": _TENSOR_CLASS}


_TABLE = _build_table()
