"""Write the files of a save, and make them a checkpoint.

On a file system: written to a staging directory, which is renamed. In an object store: under the
final names, with `metadata.json` last.

`DurableFile` writes a new file at several offsets at a time. Each thread hashes a window of bytes
and copies it to the page cache while the window is in the cache of its core; the disk starts on a
run as soon as it is copied. Windows are aligned in the file, so the system handles each as one
large block of pages, which is cheaper than single pages. (O_DIRECT was measured too: its speed is
steadier if other programs fill the page cache, but it is 15 % slower if two ranks share two cores,
because it needs aligned memory and so another copy.)
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch import Tensor

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import (
    describe_os_error,
    free_bytes,
    start_writeback,
    sync_directory,
    write_at,
    write_durably,
)
from megatron.core.dist_checkpointing.manifest import (
    COMMON_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    metadata_bytes,
)
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, StoragePath
from megatron.core.dist_checkpointing.shard_file import (
    BLOCK_BYTES,
    HASH_NAME,
    Sink,
    StoredFile,
    StreamSink,
    header_of,
    write_shards,
)
from megatron.core.dist_checkpointing.thread_pool import ThreadPool, threads_per_rank
from megatron.core.foundation.errors import CheckpointError


class CheckpointWriter(ABC):
    """Takes the files of one save. The coordinator prepares, commits or aborts it."""

    @abstractmethod
    def prepare(self, num_bytes: int) -> None:
        """Prepare for so many bytes, or raise `CheckpointError`."""

    @abstractmethod
    def sink(self, name: str, num_bytes: int, in_background: bool) -> AbstractContextManager[Sink]:
        """Open a new file of so many bytes; it is complete when the block ends."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""

    @abstractmethod
    def size_of(self, name: str) -> int | None:
        """Return the size of a written file, or None if this process does not find it."""

    @abstractmethod
    def publish(self, num_bytes: int) -> None:
        """Make the checkpoint exist: all of its files, of so many bytes together, are written."""

    @abstractmethod
    def abort(self) -> None:
        """Remove all files of the save."""

    def write(
        self,
        name: str,
        tensors: Sequence[tuple[str, Tensor]],
        metadata: dict[str, str],
        *,
        in_background: bool = False,
    ) -> StoredFile:
        """Write a shard file durably: any rank, also in a thread. See `write_shards`."""
        header = header_of(tensors, metadata)
        num_bytes = len(header) + sum(t.numel() * t.element_size() for _, t in tensors)
        with self.sink(name, num_bytes, in_background) as sink:
            return write_shards(name, header, tensors, sink)

    def commit(self, common: bytes, manifest: Manifest) -> None:
        """Write the remaining files, `metadata.json` last, and make the checkpoint exist."""
        data = manifest.to_bytes()
        self.put(COMMON_NAME, common)
        self.put(MANIFEST_NAME, data)
        self.put(METADATA_NAME, metadata_bytes(data))
        self.publish(sum(file.size for file in manifest.files.values()))


def writer_for(final: StoragePath, run: str) -> CheckpointWriter:
    """Return the writer of the checkpoint `final`."""
    if isinstance(final, ObjectDirectory):
        return ObjectStoreWriter(final)
    return DirectoryWriter(final, run)


class DirectoryWriter(CheckpointWriter):
    """A directory of a file system."""

    def __init__(self, final: Path, run: str) -> None:
        self.final, self.run = final, run
        self.staging = commit.staging_directory(final, run)

    def __str__(self) -> str:
        return str(self.staging)

    def prepare(self, num_bytes: int) -> None:
        free = free_bytes(self.final)
        if num_bytes > free:
            raise CheckpointError(
                f"ENOSPC before writing {self.final}: need={num_bytes} bytes have={free} bytes.",
                rule="a checkpoint is started only if it fits",
                flags=["--save"],
                fix="free space on that file system, or keep fewer checkpoints (--most-recent-k)",
            )
        with self._errors("preparing to write", self.staging, num_bytes):
            commit.begin(self.final, self.run)

    @contextmanager
    def sink(self, name: str, num_bytes: int, in_background: bool) -> Iterator[Sink]:
        path = self.staging / name
        with self._errors("writing", path, num_bytes):
            with DurableFile(path, num_bytes, in_background=in_background) as file:
                yield file
            sync_directory(self.staging)

    def put(self, name: str, data: bytes) -> None:
        with self._errors("writing", self.staging / name, len(data)):
            write_durably(self.staging / name, data)

    def size_of(self, name: str) -> int | None:
        path = self.staging / name
        return path.stat().st_size if path.exists() else None

    def publish(self, num_bytes: int) -> None:
        with self._errors("committing", self.staging, num_bytes):
            commit.publish(self.staging, self.final, self.run)

    def abort(self) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)

    @contextmanager
    def _errors(self, doing: str, path: Path, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise describe_os_error(
                error, path=path, doing=doing, needed_bytes=num_bytes
            ) from error


class ObjectStoreWriter(CheckpointWriter):
    """A directory of an object store.

    Saving an iteration again deletes the old checkpoint first; until the commit there is none.
    """

    def __init__(self, final: ObjectDirectory) -> None:
        self.final = final

    def __str__(self) -> str:
        return str(self.final)

    def prepare(self, num_bytes: int) -> None:
        """See `CheckpointWriter`; a store has no known limit."""
        self.abort()

    @contextmanager
    def sink(self, name: str, num_bytes: int, in_background: bool) -> Iterator[Sink]:
        num_threads = 1 if in_background else threads_per_rank()
        with self.final.writer(name, num_bytes) as write, StreamSink(write, num_threads) as sink:
            yield sink

    def put(self, name: str, data: bytes) -> None:
        self.final.write(name, data)

    def size_of(self, name: str) -> int | None:
        if not self.final.has(name):
            return None
        with self.final.open(name) as stored:
            return stored.size

    def publish(self, num_bytes: int) -> None:
        """See `CheckpointWriter`; `metadata.json` has already made the checkpoint exist."""

    def abort(self) -> None:
        self.final.remove(first=METADATA_NAME)


WINDOW_BYTES = 1 << 20
"""Bytes that are hashed and then copied at once; they fit the cache of a core."""

_Part = tuple[memoryview, "Future[str]"]


class DurableFile:
    """See `shard_file.Sink`; when `finish` returns, all bytes passed to `put` are on the disk.

    Use as a context manager: creates the file, and closes it.

    Args:
        path: must not exist.
        num_bytes: expected size of the file.
        in_background: one thread, which disturbs training least. Otherwise at least two threads:
            while one waits for the disk, the other hashes.
    Raises:
        OSError: a system call failed.
    """

    def __init__(self, path: Path, num_bytes: int, *, in_background: bool = False) -> None:
        self._path = path
        most = 1 if in_background else max(2, threads_per_rank())
        self._num_threads = min(most, num_bytes // BLOCK_BYTES + 1)
        self._position = 0
        self._run: list[_Part] = []
        self._run_bytes = 0
        self._started: list[Future[None]] = []
        self._failure: OSError | None = None

    def __enter__(self) -> DurableFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        self._threads = ThreadPool(self._num_threads)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self._failure is None:
            self._failure = OSError(errno.ECANCELED, "given up")
        self._threads.__exit__(kind, error, trace)
        os.close(self._descriptor)

    def put(self, data: memoryview | bytes) -> Future[str]:
        """Take the next bytes of the file, and return the future of their hash.

        Args:
            data: at most a block, unchanged until the hash is computed.
        """
        if len(data) > BLOCK_BYTES:
            raise ValueError(f"{len(data)} bytes are more than a block of {BLOCK_BYTES}")
        if self._failure is not None:
            raise self._failure
        if self._run_bytes + len(data) > BLOCK_BYTES:
            self.begin()
        found: Future[str] = Future()
        self._run.append((memoryview(data), found))
        self._run_bytes += len(data)
        return found

    def begin(self) -> None:
        """Begin to write all bytes passed to `put`."""
        if self._run:
            self._started.append(self._threads.start(self._write_run, self._position, self._run))
            self._position += self._run_bytes
            self._run, self._run_bytes = [], 0

    def finish(self) -> None:
        """Wait until all bytes are on the disk."""
        self.begin()
        for work in self._started:
            work.result()
        os.fsync(self._descriptor)

    def _write_run(self, position: int, run: Sequence[_Part]) -> None:
        """Write consecutive parts, in a thread."""
        try:
            if self._failure is not None:
                raise self._failure
            first = position
            for data, found in run:
                state, done = hashlib.new(HASH_NAME), 0
                while done < len(data):
                    piece = data[done : done + WINDOW_BYTES - position % WINDOW_BYTES]
                    state.update(piece)
                    write_at(self._descriptor, piece, position)
                    done, position = done + len(piece), position + len(piece)
                found.set_result(state.hexdigest())
            start_writeback(self._descriptor, first, position - first)
        except BaseException as error:
            if isinstance(error, OSError):
                self._failure = error
            for _, found in run:
                if not found.done():
                    found.set_exception(error)
            raise
