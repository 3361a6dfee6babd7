"""Write the files of a save, and make them a checkpoint.

On a file system: written to a staging directory, which is renamed. In an object store: under the
final names, with `metadata.json` last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch import Tensor

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import (
    describe_os_error,
    sync_directory,
    write_durably,
)
from megatron.core.dist_checkpointing.durable_file import DurableFile
from megatron.core.dist_checkpointing.manifest import (
    COMMON_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    metadata_bytes,
)
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, StoragePath
from megatron.core.dist_checkpointing.shard_file import (
    Sink,
    StoredFile,
    StreamSink,
    header_of,
    space_problem,
    write_shards,
)
from megatron.core.dist_checkpointing.thread_pool import threads_per_rank


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
        """Return the size of a file that was written, or None if it is not seen here."""

    @abstractmethod
    def publish(self, num_bytes: int) -> None:
        """Make the checkpoint exist: all of its files, of so many bytes together, are written."""

    @abstractmethod
    def abort(self) -> None:
        """Leave no trace."""

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
        """See `CheckpointWriter`."""
        problem = space_problem(self.final, num_bytes)
        if problem is not None:
            raise problem
        with self._errors("preparing to write", self.staging, num_bytes):
            commit.begin(self.final, self.run)

    @contextmanager
    def sink(self, name: str, num_bytes: int, in_background: bool) -> Iterator[Sink]:
        """See `CheckpointWriter`."""
        path = self.staging / name
        with self._errors("writing", path, num_bytes):
            with DurableFile(path, num_bytes, in_background=in_background) as file:
                yield file
            sync_directory(self.staging)

    def put(self, name: str, data: bytes) -> None:
        """See `CheckpointWriter`."""
        with self._errors("writing", self.staging / name, len(data)):
            write_durably(self.staging / name, data)

    def size_of(self, name: str) -> int | None:
        """See `CheckpointWriter`."""
        path = self.staging / name
        return path.stat().st_size if path.exists() else None

    def publish(self, num_bytes: int) -> None:
        """See `CheckpointWriter`."""
        with self._errors("committing", self.staging, num_bytes):
            commit.publish(self.staging, self.final, self.run)

    def abort(self) -> None:
        """See `CheckpointWriter`."""
        commit.abort(self.staging)

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

    Saving an iteration again deletes the old one first: between the two there is neither.
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
        """See `CheckpointWriter`."""
        num_threads = 1 if in_background else threads_per_rank()
        with self.final.writer(name, num_bytes) as write, StreamSink(write, num_threads) as sink:
            yield sink

    def put(self, name: str, data: bytes) -> None:
        """See `CheckpointWriter`."""
        self.final.write(name, data)

    def size_of(self, name: str) -> int | None:
        """See `CheckpointWriter`."""
        if not self.final.has(name):
            return None
        with self.final.open(name) as stored:
            return stored.size

    def publish(self, num_bytes: int) -> None:
        """See `CheckpointWriter`; it exists since `metadata.json` does."""

    def abort(self) -> None:
        """See `CheckpointWriter`."""
        self.final.remove(first=METADATA_NAME)
