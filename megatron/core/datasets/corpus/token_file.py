"""Read the tokens of a `.bin` file, mapped or by positioned reads; write files atomically.

Everything in this package is written with `AtomicFile`: under a temporary name, renamed when it is
complete, so that a file under its final name is never half-written.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import resource
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Protocol

import numpy as np

from megatron.core.foundation.errors import DataError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Python 3.13 maps a file without keeping a descriptor of it.
_MAP_OPTIONS: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class TokenReader(Protocol):
    """Random access to the tokens of a file; safe to use after a fork."""

    @property
    def buffer(self) -> np.ndarray | None:
        """uint8, the whole file, if it is mapped, else None."""

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Return `count` tokens from byte `offset`; the array may be read-only."""


def mapped(path: str) -> np.ndarray:
    """Map a file: uint8, read-only. A plain array, as slices of a numpy.memmap are slow."""
    try:
        return _mapped(path)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    # A blend of many corpora: the usual soft limit is 1,024 files, the hard limit far above.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return _mapped(path)


def _mapped(path: str) -> np.ndarray:
    with open(path, "rb") as file:
        # An empty file cannot be mapped, and a corpus without tokens is a valid pair.
        if not os.fstat(file.fileno()).st_size:
            return np.empty(0, np.uint8)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **_MAP_OPTIONS)
    return np.frombuffer(memory, np.uint8)


class MappedTokens:
    """Tokens through a memory map: pages are shared by all processes of a machine."""

    def __init__(self, path: str) -> None:
        self.buffer = mapped(path)

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Return a read-only view of the mapped file."""
        if count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)


class PositionedTokens:
    """Tokens through `pread`, for file systems that map badly (--no-mmap-bin-files)."""

    buffer: None = None

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = io.FileIO(path)

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Return a fresh copy. `pread` shares no file position, so a forked child may use it."""
        wanted = count * np.dtype(dtype).itemsize
        data = os.pread(self._file.fileno(), wanted, offset)
        while len(data) < wanted:  # one call returns at most 2 GiB
            more = os.pread(self._file.fileno(), wanted - len(data), offset + len(data))
            if not more:
                raise DataError(
                    f"{self._path}: the file ended at byte {offset + len(data)} while "
                    f"{wanted - len(data)} more bytes were expected.",
                    rule="a corpus must not change while it is in use",
                    flags=["--data-path"],
                    fix="restore the file and start again",
                )
            data += more
        return np.frombuffer(data, dtype=dtype)

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()


@contextmanager
def explain_full_disk(path: str, written: int) -> Iterator[None]:
    """Turn a full disk, quota or size limit into a `DataError` with the bytes written so far."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise DataError(
            f"no space left while writing {path}: {written} bytes were written "
            f"({os.strerror(error.errno or 0)}).",
            rule="the whole file must fit; nothing is left under its final name",
            flags=["--output-prefix", "--data-cache-path"],
            fix=f"free space on the file system of {os.path.dirname(os.path.abspath(path))}, "
            "or write elsewhere",
        ) from error


def cannot_write(path: str, error: OSError) -> DataError:
    """Return the error for a file that cannot be made or opened for writing."""
    return DataError(
        f"cannot write {path}: {error.strerror}.",
        rule="the output directory must be writable",
        flags=["--output-prefix", "--data-cache-path"],
        fix="choose another place or change its permissions",
    )


class AtomicFile:
    """A file written under a temporary name in the folder of its final name.

    `commit` makes it durable and renames it; `discard` removes the partial file, and so does an
    error while writing.

    Args:
        path: the final name.
        partial: the temporary name, if the file has one writer: a file that a killed writer left
            there is replaced. By default the name is unpredictable.
    """

    def __init__(self, path: str, partial: str | None = None) -> None:
        self.path = path
        self.bytes_written = 0
        self._file: BinaryIO | None = None
        # A new file under an unpredictable name: other users with write access to the folder could
        # create a link of a known name, and processes on two machines may have the same number.
        self._partial = partial or f"{path}.partial-{os.getpid()}-{secrets.token_hex(4)}"
        directory = os.path.dirname(os.path.abspath(path))
        try:
            with explain_full_disk(path, 0):
                os.makedirs(directory, exist_ok=True)
                if partial is not None:
                    with suppress(FileNotFoundError):
                        os.unlink(partial)
                # A buffer of 1 MiB: documents are small, and system calls are expensive.
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(self._partial, flags, 0o666)
                self._file = io.BufferedWriter(io.FileIO(descriptor, "w"), 1 << 20)
        except OSError as error:
            raise cannot_write(path, error) from error

    @contextmanager
    def _guarded(self) -> Iterator[BinaryIO]:
        assert self._file is not None, f"{self.path} is already committed or discarded"
        try:
            with explain_full_disk(self.path, self.bytes_written):
                yield self._file
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes."""
        size = memoryview(data).nbytes
        with self._guarded() as file:
            file.write(data)
        self.bytes_written += size
        return size

    def flush_to_disk(self) -> None:
        """Force everything written onto the device: after this, only the rename is left."""
        with self._guarded() as file:
            file.flush()
            os.fsync(file.fileno())

    def rename(self) -> None:
        """Give the flushed file its final name, replacing an older file."""
        with self._guarded() as file:
            file.close()
            os.replace(self._partial, self.path)
        self._file = None

    def commit(self) -> None:
        """Flush, rename and make the rename durable."""
        self.flush_to_disk()
        self.rename()
        sync_directory(os.path.dirname(os.path.abspath(self.path)))

    def discard(self) -> None:
        """Remove the partial file; do nothing once committed."""
        if self._file is None:
            return
        # Closing flushes the buffer, which fails again on a full disk: the file is removed anyway.
        with suppress(OSError):
            self._file.close()
        self._file = None
        with suppress(FileNotFoundError):
            os.unlink(self._partial)

    def __del__(self) -> None:
        self.discard()


def sync_directory(directory: str) -> None:
    """Make renames in `directory` survive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
