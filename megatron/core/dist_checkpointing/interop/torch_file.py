"""Files of `torch.save`, opened as data: tensors stay in the file until they are read.

Two containers exist. The newer one is a zip archive without compression: `NAME/data.pkl` is a
pickle whose persistent ids name the storages, `NAME/data/KEY` are their bytes, `NAME/byteorder`
says how they are written. The older one is a row of pickles (magic number, version, system data,
the value, the keys of the storages) followed by the storages, each after its number of elements.
An archive may be inside a larger file, as in torch's distributed checkpoints.
"""

from __future__ import annotations

import bisect
import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError, open_inside
from megatron.core.dist_checkpointing.interop.pickle_allowlist import Storage, StorageType, lookup
from megatron.core.dist_checkpointing.interop.pickles import MAX_LINE, load_pickle
from megatron.core.dist_checkpointing.interop.stored_view import StoredBytes, is_other_byte_order
from megatron.core.foundation.errors import shown

MAX_PICKLE_BYTES = 1 << 30
MAX_MEMBERS = 1 << 22
MAX_KEY = 1 << 8
"""Characters of the key of a storage; torch counts them."""
_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


def read_torch_file(path: Path) -> Any:
    """Return the value of a file of `torch.save`; its tensors are `StoredView`s.

    Raises:
        DamagedCheckpointError: it is not such a file, or holds what is not on the allowlist.
    """
    with open_inside(path.parent, path.name) as (descriptor, size):
        return read_torch_range(descriptor, path, 0, size)


def read_torch_range(descriptor: int, path: Path, begin: int, length: int) -> Any:
    """Do as `read_torch_file` for the bytes begin .. begin + length - 1 of an open file."""
    part = _Part(descriptor, begin, length)
    buffered = io.BufferedReader(part, 1 << 16)
    magic = buffered.peek(4)[:4]
    if magic == _ZIP_MAGIC:
        return _Archive(part, path, begin).value()
    if magic[:1] == b"\x80":
        return _LegacyFile(_Bounded(buffered), path, begin, length).value()
    raise DamagedCheckpointError(
        f"{path} is not a file of torch.save: it begins with {magic!r} at byte {begin}.",
        rule="checkpoint files are archives (PK) or pickles",
        fix="use another checkpoint",
    )


class _Part(io.RawIOBase):
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


class _Bounded:
    """The reads that a pickle needs, none longer than a pickle may be."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self, size: int) -> bytes:
        if size > MAX_PICKLE_BYTES:
            raise ValueError(f"a value of {size} bytes")
        return self.file.read(size)

    def readline(self) -> bytes:
        return self.file.readline(MAX_LINE)

    def tell(self) -> int:
        return self.file.tell()


class _Archive:
    """One zip archive."""

    def __init__(self, part: _Part, path: Path, begin: int) -> None:
        self.part, self.path, self.begin = part, path, begin
        part.seek(0)
        try:
            self.zip = zipfile.ZipFile(part)
            members = self.zip.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as e:
            self.damaged(f"its directory cannot be read ({e})")
        except (UnicodeError, OverflowError, MemoryError) as e:
            self.damaged(f"its directory is malformed ({type(e).__name__})")
        self.members = {member.filename: member for member in members}
        self.begins = sorted(member.header_offset for member in members)
        if len(self.members) != len(members) or len(members) > MAX_MEMBERS:
            self.damaged("two members have one name, or there are too many")
        pickles = [name for name in self.members if name.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            self.damaged("it has no data.pkl, or several")
        self.prefix = pickles[0].removesuffix("data.pkl")
        order = self.small("byteorder", b"little").decode("latin-1")
        if order not in ("little", "big"):
            self.damaged(f"its byte order is {shown(order)}")
        self.is_swapped = is_other_byte_order(order)
        self.storages: dict[str, Storage] = {}

    def value(self) -> Any:
        data = self.contents(self.members[self.prefix + "data.pkl"], MAX_PICKLE_BYTES)
        where = f"{self.path}!{self.prefix}data.pkl"
        return load_pickle(data, lookup, what=where, persistent=self.persistent)

    def persistent(self, identifier: Any) -> Storage:
        """Return the storage of ("storage", class, key, device, number of elements)."""
        key, dtype, count = _storage_id(identifier)
        if key in self.storages:
            return self.storages[key]
        member = self.members.get(f"{self.prefix}data/{key}")
        if member is None:
            raise DamagedCheckpointError(f"the storage {shown(key)} is not in the archive")
        begin = self.data_position(member)
        item = 1 if dtype is None else dtype.itemsize
        if count * item != member.file_size:
            raise DamagedCheckpointError(
                f"the storage {shown(key)} has {member.file_size} bytes, not {count} elements"
            )
        stored = StoredBytes(
            self.path, self.begin + begin, member.file_size, member.CRC, self.is_swapped
        )
        self.storages[key] = Storage(stored, dtype)
        return self.storages[key]

    def data_position(self, member: zipfile.ZipInfo) -> int:
        """Return where a member's bytes begin; its local header must agree with the directory."""
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            self.damaged(f"{shown(member.filename)} is compressed or encrypted")
        if not 0 <= member.header_offset < self.part.length:
            self.damaged(f"{shown(member.filename)} is outside of it")
        self.part.seek(member.header_offset)
        header = self.part.read(_LOCAL_HEADER.size) or b""
        if len(header) != _LOCAL_HEADER.size:
            self.damaged(f"{shown(member.filename)} is after its end")
        fields = _LOCAL_HEADER.unpack(header)
        name = self.part.read(fields[9]) or b""
        if fields[0] != _ZIP_MAGIC or name != member.filename.encode():
            self.damaged(f"{shown(member.filename)} is not where the directory says")
        position = member.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10]
        after = bisect.bisect_right(self.begins, member.header_offset)
        end = self.begins[after] if after < len(self.begins) else self.part.length
        if position + member.file_size > end or member.file_size < 0:
            self.damaged(f"{shown(member.filename)} ends after it, or in another member")
        return position

    def contents(self, member: zipfile.ZipInfo, limit: int) -> bytes:
        if member.file_size > limit:
            self.damaged(f"{shown(member.filename)} has {member.file_size} bytes")
        self.data_position(member)
        try:
            return self.zip.read(member)  # verifies the checksum
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
            self.damaged(f"{shown(member.filename)} cannot be read ({error})")

    def small(self, name: str, default: bytes) -> bytes:
        member = self.members.get(self.prefix + name)
        return default if member is None else self.contents(member, 64)

    def damaged(self, what: str) -> NoReturn:
        raise DamagedCheckpointError(
            f"{self.path} is damaged: in the archive at byte {self.begin}, {what}.",
            rule="torch.save writes archives of stored, uncompressed members",
            fix="use another checkpoint",
        )


class _LegacyFile:
    """A file written without an archive (torch before 1.6, or asked for)."""

    def __init__(self, file: Any, path: Path, begin: int, length: int) -> None:
        self.file, self.path, self.begin, self.length = file, path, begin, length
        self.wanted: dict[str, tuple[StoredBytesLater, torch.dtype | None, int]] = {}

    def value(self) -> Any:
        if self._next() != _LEGACY_MAGIC or self._next() != _LEGACY_VERSION:
            self._damaged("it does not begin as torch.save does")
        system = self._next()
        is_little = system.get("little_endian", True) if isinstance(system, dict) else True
        value = self._next(self.persistent)
        keys = self._next()
        if type(keys) is not list or any(type(key) is not str for key in keys):
            self._damaged("the keys of its storages are no list of names")
        position = self.file.tell()
        swapped = is_other_byte_order("little" if is_little else "big")
        for key in keys:
            if key not in self.wanted:
                self._damaged(f"a storage {shown(key)} that no tensor names")
            later, dtype, count = self.wanted.pop(key)
            self.file.file.seek(position)
            header = self.file.read(8)
            if len(header) != 8 or struct.unpack("<q" if is_little else ">q", header)[0] != count:
                self._damaged(f"the storage {shown(key)} has another number of elements")
            num_bytes = count * (1 if dtype is None else dtype.itemsize)
            if position + 8 + num_bytes > self.length:
                self._damaged(f"the storage {shown(key)} ends after the file")
            later.settle(self.begin + position + 8, swapped)
            position += 8 + num_bytes
        if self.wanted:
            self._damaged("tensors without storage")
        return value

    def persistent(self, identifier: Any) -> Storage:
        if type(identifier) is tuple and len(identifier) == 6 and identifier[5] is not None:
            raise DamagedCheckpointError("a view of a storage (written by torch before 0.4)")
        key, dtype, count = _storage_id(identifier[:5] if type(identifier) is tuple else None)
        if key in self.wanted and self.wanted[key][1:] != (dtype, count):
            raise DamagedCheckpointError(f"the storage {shown(key)} is described in two ways")
        if key not in self.wanted:
            num_bytes = count * (1 if dtype is None else dtype.itemsize)
            if num_bytes > self.length:
                raise DamagedCheckpointError(f"the storage {shown(key)} is larger than the file")
            self.wanted[key] = (StoredBytesLater(self.path, num_bytes), dtype, count)
        return Storage(self.wanted[key][0], dtype)

    def _next(self, persistent: Any = None) -> Any:
        return load_pickle(self.file, lookup, what=str(self.path), persistent=persistent)

    def _damaged(self, what: str) -> NoReturn:
        raise DamagedCheckpointError(
            f"{self.path} is damaged: {what}.",
            rule="a file of torch.save without archive is five pickles and the storages",
            fix="use another checkpoint",
        )


class StoredBytesLater(StoredBytes):
    """Bytes whose offset in the file is known only after the value was read."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path, 0, num_bytes)

    def settle(self, begin: int, is_swapped: bool) -> None:
        """Say where they are; done once, before anything is read."""
        object.__setattr__(self, "begin", begin)
        object.__setattr__(self, "is_swapped", is_swapped)


def _storage_id(identifier: Any) -> tuple[str, torch.dtype | None, int]:
    if type(identifier) is not tuple or len(identifier) != 5 or identifier[0] != "storage":
        raise DamagedCheckpointError(f"{shown(identifier)} as a storage")
    _, kind, key, _, count = identifier
    if not isinstance(kind, StorageType) or type(key) is not str or len(key) > MAX_KEY:
        raise DamagedCheckpointError(f"a storage of class {shown(kind)}")
    if type(count) is not int or not 0 <= count < 1 << 60:
        raise DamagedCheckpointError(f"a storage of {shown(count)} elements")
    return key, kind.dtype, count
