"""Durable files: writing with fsync, renaming, and opening untrusted files.

Every write, fsync, rename and unlink of a checkpoint is an `os` call made here or in `writer`, so
that the crash tests can stop a save at each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.core.dist_checkpointing.object_store import ObjectDirectory, StoragePath
from megatron.core.foundation.errors import CheckpointError


class DamagedCheckpointError(CheckpointError):
    """Files differ from the saved ones: missing, changed, truncated, of another format or unsafe.

    Another checkpoint may be intact, so a loader may log this error and try that one. For any other
    `CheckpointError` (a mismatch with the model, a failing disk) another checkpoint does not help.
    """


_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def describe_os_error(
    error: OSError, *, path: Path | str, doing: str, needed_bytes: int | None = None
) -> CheckpointError:
    """Turn a failed system call into a message for the user: path, bytes, advice."""
    name = errno.errorcode.get(error.errno or 0, "OSError")
    amount = "" if needed_bytes is None else f"{needed_bytes} bytes to "
    found = f"{name} while {doing} {amount}{path}: {error.strerror or error}."
    if error.errno in _DISK_FULL:
        free = free_bytes(path)
        need = "" if needed_bytes is None else f" need={needed_bytes} bytes"
        found = f"{found[:-1]}:{need} have={free} bytes."
        fix = "free space on that file system, or keep fewer checkpoints (--most-recent-k)"
    elif error.errno == errno.EROFS:
        fix = "the file system is mounted read-only: save elsewhere or remount it"
    elif error.errno in (errno.EACCES, errno.EPERM):
        fix = "give this user permission on that path, or use another directory"
    elif error.errno == errno.ENOENT:
        fix = "all ranks need one shared directory, which rank 0 prepares: is it mounted here?"
    elif error.errno == errno.EIO:
        fix = "the storage reports a hardware or network error: check it before the next save"
    else:
        fix = "check the path and its storage"
    return CheckpointError(found, flags=["--save", "--load"], fix=fix)


def free_bytes(path: Path | str) -> int:
    """Return the bytes this user may still write on the file system of `path`."""
    existing = Path(path)
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        status = os.statvfs(existing)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def write_all(descriptor: int, data: memoryview | bytes) -> None:
    """Write every byte: one system call may write only a part."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]


def write_at(descriptor: int, data: memoryview, position: int) -> None:
    """Write every byte at a position."""
    while len(data):
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count


_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of Linux."""


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's `sync_file_range`, which Python lacks; None on other systems."""
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call: Callable[[int, int, int, int], int] = found
    return call


_SYNC_FILE_RANGE = _find_sync_file_range()


def start_writeback(descriptor: int, begin: int, num_bytes: int) -> None:
    """Start writing these bytes to the disk, so that fsync has little left to do.

    It is a hint; without it fsync is only slower. `posix_fadvise(DONTNEED)` starts the disk too,
    but it also searches for pages to drop and finds none yet: measured, writing takes 50 % more
    processor time.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, begin, num_bytes, _START_WRITING)


def write_durably(path: Path, data: bytes) -> None:
    """Create a new file, and return when its bytes are on the disk.

    The name itself is durable only after `sync_directory` on the parent.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: files created, renamed or removed there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(source: Path, target: Path) -> None:
    """Rename atomically within one directory, and return when the rename is on the disk."""
    os.rename(source, target)
    sync_directory(target.parent)


def replace_durably(path: Path, data: bytes) -> None:
    """Replace the content of `path` in one step: readers get the old bytes or the new ones.

    One process at a time may do this to a path.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(scratch)  # left by a process that was killed here
    write_durably(scratch, data)
    rename_durably(scratch, path)


def remove_tree(path: Path, *, retired_as: Path | None = None) -> None:
    """Delete a directory; with `retired_as` rename it first, so that no half-deleted directory has
    a name that loaders read."""
    if retired_as is not None:
        rename_durably(path, retired_as)
        path = retired_as
    shutil.rmtree(path)


class OpenFile(Protocol):
    """A file of a checkpoint, open for reading. Several threads may read at once."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    def read_into(self, into: memoryview, position: int) -> None:
        """Fill `into` from byte `position`, or raise `CheckpointError`."""
        ...

    def forget_cached(self) -> None:
        """Drop cached pages where the system supports it, so that the next reads use the disk."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A regular file of this machine's file systems."""

    path: Path
    descriptor: int
    size: int

    def read_into(self, into: memoryview, position: int) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self.descriptor, [into[done:]], position + done)
            except OSError as error:
                raise describe_os_error(error, path=self.path, doing="reading") from error
            if count == 0:
                raise DamagedCheckpointError(
                    f"{self.path} ends at byte {position + done}; byte {position + len(into)} is "
                    "needed.",
                    rule="a checkpoint file has exactly the size that its manifest records",
                    fix="the file was truncated: use another checkpoint",
                )
            done += count

    def forget_cached(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def open_local(directory: Path, name: str) -> Iterator[LocalFile]:
    """Open a regular file of a checkpoint for reading.

    A symbolic link, a pipe, a device or a name with a path in it is refused, so nothing outside
    the directory is opened and nothing blocks.
    """
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
        raise DamagedCheckpointError(
            f"CKPT_UNSAFE file={name!r}: a file name in {directory} has a path in it.",
            rule="a checkpoint refers only to files of its own directory",
        )
    path = directory / name
    # O_NONBLOCK: opening a pipe without a writer must not hang.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_a_file(path, "a symbolic link or a special file") from None
        raise describe_os_error(error, path=path, doing="opening") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_a_file(path, "not a regular file")
        yield LocalFile(path, descriptor, status.st_size)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_file(directory: StoragePath, name: str) -> Iterator[OpenFile]:
    """Open a file of a checkpoint in a directory (see `open_local`) or in an object store."""
    if isinstance(directory, ObjectDirectory):
        try:
            with directory.open(name) as stored:
                yield stored
        except FileNotFoundError:
            raise missing_file(directory / name) from None
        return
    with open_local(directory, name) as file:
        yield file


def missing_file(path: StoragePath) -> DamagedCheckpointError:
    """Return the error for a file that should be there."""
    return DamagedCheckpointError(
        f"{path} is missing.",
        rule="a checkpoint is complete only with every file of its manifest",
    )


def _not_a_file(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"CKPT_UNSAFE file={path}: it is {what}.",
        rule="a checkpoint consists of regular files in its own directory",
        fix="copy the file itself into the checkpoint directory if you trust it",
    )


def read_inside(directory: StoragePath, name: str, *, limit_bytes: int) -> bytes:
    """Read a whole small file of a checkpoint; a file above `limit_bytes` is refused unread."""
    with open_file(directory, name) as file:
        if file.size > limit_bytes:
            raise DamagedCheckpointError(
                f"{directory / name} has {file.size} bytes; at most {limit_bytes} are expected "
                "here.",
                rule="metadata files are small",
            )
        data = bytearray(file.size)
        file.read_into(memoryview(data), 0)
        return bytes(data)
