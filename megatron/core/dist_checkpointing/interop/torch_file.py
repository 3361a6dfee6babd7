"""Files of `torch.save`, read by `torch.load(weights_only=True)`: nothing in them is executed.

Tensors stay in the file: torch loads them without data (`map_location="meta"`) and returns the
position of every storage in the archive, so a checkpoint is described without reading it. Other
files (written before torch 1.6, or in the other byte order) are loaded whole.
Classes of the programs that wrote the file become inert `Record`s; any other name is refused.
"""

from __future__ import annotations

import bisect
import io
import os
import pickle
import pickletools
import re
import zipfile
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError, LocalFile, open_local
from megatron.core.dist_checkpointing.interop.pickles import (
    Record,
    check_tree,
    inert_class,
    refuse,
)
from megatron.core.dist_checkpointing.interop.stored_view import StoredBytes, StoredView
from megatron.core.foundation.errors import shown

MAX_PICKLE_BYTES = 1 << 30
MAX_MEMBERS = 1 << 22
_ZIP_MAGIC = b"PK\x03\x04"


def _plain_bytes(data: bytes = b"") -> bytes:
    if type(data) is not bytes:
        raise TypeError("not bytes")
    return data


_PLAIN: dict[str, Any] = {
    "argparse.Namespace": Namespace, "types.SimpleNamespace": SimpleNamespace,
    "collections.defaultdict": defaultdict, "builtins.frozenset": frozenset,
    "builtins.bytes": _plain_bytes,
} | {
    f"builtins.{kind}": type(kind, (Record,), {"kind": f"builtins.{kind}"})
    for kind in ("dict", "list", "int", "float", "str", "bool", "tuple")
}  # fmt: skip
"""Globals that torch does not allow by default -> classes that replace them."""


def read_torch_file(path: Path) -> Any:
    """Return the value of a file of `torch.save`; its tensors are `StoredView`s.

    Raises:
        UnsafePickleError: the file names a class or function that is not on the allowlist.
        DamagedCheckpointError: it is not such a file, or it is damaged.
    """
    with open_local(path.parent, path.name) as file:
        return read_torch_range(file, 0, file.size)


def read_torch_dict(path: Path) -> dict[Any, Any]:
    """Do as `read_torch_file` for a file that holds a dict of states."""
    value = read_torch_file(path)
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{path} does not hold a dict of states.")
    return value


def read_torch_range(whole: LocalFile, begin: int, length: int) -> Any:
    """Do as `read_torch_file` for the bytes begin .. begin + length - 1 of an open file."""
    path = whole.path
    file: Any = io.BufferedReader(_Range(whole.descriptor, begin, length), 1 << 16)
    magic = file.peek(4)[:4]
    if magic != _ZIP_MAGIC and magic[:1] != b"\x80":
        _damaged(path, begin, f"the first bytes are {magic!r}")
    archive = _Archive(file, path, begin, length) if magic == _ZIP_MAGIC else None
    is_described = archive is not None and not archive.is_swapped
    try:
        names = _global_names(
            file if archive is None else io.BufferedReader(io.BytesIO(archive.pickle))
        )
        stand_ins: list[Any] = [
            (found, dotted)
            for name in sorted(names)
            for dotted in [name.replace("__builtin__", "builtins").replace(" ", ".")]
            if (found := _PLAIN.get(dotted) or inert_class(name)) is not None
        ]
        file.seek(0)
        with torch.serialization.safe_globals(stand_ins):
            value = torch.load(
                file, map_location="meta" if is_described else "cpu", weights_only=True
            )
    except DamagedCheckpointError:
        raise
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        refuse(
            str(path), f"the global {name[1]}" if name else f"its pickle ({str(error)[-200:]!r})"
        )
    except Exception as error:
        _damaged(path, begin, f"torch cannot read it ({type(error).__name__}: {error!s:.200})")
    check_tree(value, str(path), 64 * length + (1 << 20))
    storages: dict[int, StoredBytes] = {}

    def stored(tensor: Tensor) -> StoredView:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            refuse(str(path), f"a tensor of layout {tensor.layout}")
        storage = tensor.untyped_storage()
        if archive is not None and is_described:
            position = storage._checkpoint_offset or 0
            if position not in storages:
                storages[position] = archive.storage(position, storage.nbytes())
        else:
            position = storage.data_ptr()
            if position not in storages:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)
                storages[position] = StoredBytes(path, 0, storage.nbytes(), memory=memory)
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        view = StoredView(storages[position], tensor.dtype, shape, stride, offset)
        if (problem := view.problem()) is not None:
            refuse(str(path), problem)
        return view

    return _described(value, stored)


def _described(value: Any, stored: Any) -> Any:
    """Return a value with `StoredView`s for tensors, dicts for namespaces and text for devices."""
    if isinstance(value, Tensor):
        return stored(value)
    if isinstance(value, (Namespace, SimpleNamespace)):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _described(item, stored) for key, item in value.items()}
    if isinstance(value, (list, set, frozenset)):
        return type(value)([_described(item, stored) for item in value])
    if isinstance(value, tuple):
        return tuple(_described(item, stored) for item in value)
    if isinstance(value, Record) and value.kind.startswith("pathlib."):
        return "/".join(map(str, value.args))
    return str(value) if isinstance(value, torch.device) else value


def _global_names(stream: Any) -> set[str]:
    """Return the names ("module name") of all globals of the pickles in a stream.

    An archive has one pickle. The older form has five, and the storages follow them.
    """
    names: set[str] = set()
    try:
        for _ in range(5):
            if stream.peek(1) == b"":
                break
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "GLOBAL":
                    names.add(str(argument))
    except (ValueError, OverflowError, MemoryError):
        pass  # torch refuses a damaged file
    return names


class _Range(io.RawIOBase):
    """A range of an open file, as a file of its own."""

    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        self.descriptor, self.begin, self.length = descriptor, begin, length
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length - self.position))
        count = os.preadv(self.descriptor, [view[:count]], self.begin + self.position)
        self.position += count
        return count


class _Archive:
    """The members of a zip archive; torch does not compare them with the archive's directory."""

    def __init__(self, file: Any, path: Path, begin: int, length: int) -> None:
        self.path, self.begin, self.length = path, begin, length
        try:
            with zipfile.ZipFile(file) as archive:
                self.members = sorted(archive.infolist(), key=lambda m: m.header_offset)
                names = [member.filename for member in self.members]
                (data,) = (name for name in names if name.endswith("/data.pkl"))
                if len(set(names)) != len(names) or len(names) > MAX_MEMBERS:
                    raise ValueError("two members have one name, or there are too many")
                if archive.getinfo(data).file_size > MAX_PICKLE_BYTES:
                    raise ValueError(f"{data} is too large")
                self.pickle = archive.read(data)  # its checksum is verified
                order = data.removesuffix("data.pkl") + "byteorder"
                self.is_swapped = order in names and archive.read(order) != b"little"
        except Exception as error:
            self.damaged(f"its members cannot be read ({type(error).__name__}: {error!s:.200})")
        self.begins = [member.header_offset for member in self.members]

    def storage(self, position: int, num_bytes: int) -> StoredBytes:
        """Describe the storage that torch has found at a position."""
        if num_bytes == 0:
            return StoredBytes(self.path, 0, 0)
        index = bisect.bisect_right(self.begins, position) - 1
        member, end = self.members[index], [*self.begins, self.length][index + 1]
        if member.file_size != num_bytes or position + num_bytes > end:
            self.damaged(f"a storage of {num_bytes} bytes ends in another member")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            self.damaged(f"{shown(member.filename)} is compressed or encrypted")
        return StoredBytes(self.path, self.begin + position, num_bytes, member.CRC)

    def damaged(self, what: str) -> NoReturn:
        _damaged(self.path, self.begin, what)


def _damaged(path: Path, begin: int, what: str) -> NoReturn:
    raise DamagedCheckpointError(
        f"{path} is damaged: in the file of torch.save at byte {begin}, {what}.",
        rule="torch.save writes archives of stored, uncompressed members",
        fix="use another checkpoint",
    )
