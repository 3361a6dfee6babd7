"""Where a save goes, and how it becomes a checkpoint there.

On a file system: prepared beside its place and renamed. In an object store: in its place, with
`metadata.json` last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import (
    describe_os_error,
    sync_directory,
    write_durably,
)
from megatron.core.dist_checkpointing.manifest import (
    COMMON_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    metadata_bytes,
)
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, Place
from megatron.core.dist_checkpointing.shard_file import (
    StoredFile,
    room_for,
    write_shard_file,
    write_shards,
)


class Destination(Protocol):
    """Takes the files of one save. The coordinator prepares, commits or abandons it."""

    def prepare(self, num_bytes: int) -> None:
        """Make a place for so many bytes, or raise `CheckpointError`."""
        ...

    def write(
        self,
        name: str,
        tensors: Sequence[tuple[str, Tensor]],
        metadata: dict[str, str],
        num_threads: int,
    ) -> StoredFile:
        """Write a shard file durably: any rank, also in a thread."""
        ...

    def size_of(self, name: str) -> int | None:
        """Return the size of a file that was written, or None if it is not seen here."""
        ...

    def commit(self, common: bytes, manifest: Manifest) -> None:
        """Write the remaining files and make the checkpoint exist."""
        ...

    def abandon(self) -> None:
        """Leave no trace."""
        ...


def destination_of(final: Place, run: str) -> Destination:
    """Return the destination of the checkpoint `final`."""
    if isinstance(final, ObjectDirectory):
        return ObjectDestination(final)
    return LocalDestination(final, run)


class LocalDestination:
    """A directory of a file system."""

    def __init__(self, final: Path, run: str) -> None:
        self.final, self.run = final, run
        self.staging = commit.staging_directory(final, run)

    def __str__(self) -> str:
        return str(self.staging)

    def prepare(self, num_bytes: int) -> None:
        """See `Destination`."""
        problem = room_for(self.final, num_bytes)
        if problem is not None:
            raise problem
        try:
            commit.begin(self.final, self.run)
        except OSError as error:
            raise describe_os_error(error, path=self.staging, doing="creating") from error

    def write(
        self,
        name: str,
        tensors: Sequence[tuple[str, Tensor]],
        metadata: dict[str, str],
        num_threads: int,
    ) -> StoredFile:
        """See `Destination`."""
        stored = write_shard_file(self.staging / name, tensors, metadata, num_threads=num_threads)
        sync_directory(self.staging)
        return stored

    def size_of(self, name: str) -> int | None:
        """See `Destination`."""
        path = self.staging / name
        return path.stat().st_size if path.exists() else None

    def commit(self, common: bytes, manifest: Manifest) -> None:
        """See `Destination`."""
        write_durably(self.staging / COMMON_NAME, common)
        commit.publish(self.staging, self.final, manifest, self.run)

    def abandon(self) -> None:
        """See `Destination`."""
        commit.abandon(self.staging)


class ObjectDestination:
    """A directory of an object store.

    Saving an iteration again deletes the old one first: between the two there is neither.
    """

    def __init__(self, final: ObjectDirectory) -> None:
        self.final = final

    def __str__(self) -> str:
        return str(self.final)

    def prepare(self, num_bytes: int) -> None:
        """See `Destination`; a store has no known limit."""
        self.final.remove(first=METADATA_NAME)

    def write(
        self,
        name: str,
        tensors: Sequence[tuple[str, Tensor]],
        metadata: dict[str, str],
        num_threads: int,
    ) -> StoredFile:
        """See `Destination`."""
        num_bytes = sum(t.numel() * t.element_size() for _, t in tensors)
        with self.final.writer(name, num_bytes) as write:
            return write_shards(
                name,
                tensors,
                metadata,
                write=write,
                finish=lambda: None,
                num_threads=num_threads,
            )

    def size_of(self, name: str) -> int | None:
        """See `Destination`."""
        if not self.final.has(name):
            return None
        with self.final.open(name) as stored:
            return stored.size

    def commit(self, common: bytes, manifest: Manifest) -> None:
        """See `Destination`."""
        data = manifest.to_bytes()
        self.final.write(COMMON_NAME, common)
        self.final.write(MANIFEST_NAME, data)
        self.final.write(METADATA_NAME, metadata_bytes(data))

    def abandon(self) -> None:
        """See `Destination`."""
        self.final.remove(first=METADATA_NAME)
