"""Checkpoints in an object store, through fsspec: s3://bucket/run, gs://..., memory://..., file://...

A store has no rename, no lock and no directories, but an object appears whole or not at all. So
files are written under their final names. `metadata.json` protects all others by hashes and is
written last: a checkpoint without it does not exist. It is deleted first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.core.foundation.errors import CheckpointError
from megatron.core.foundation.optional_imports import require

Result = TypeVar("Result")


def is_url(where: str | os.PathLike[str]) -> bool:
    """Whether a directory is named by a URL."""
    return isinstance(where, str) and "://" in where


class ObjectDirectory:
    """A directory of an object store, with the operations that checkpoints need."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        fsspec = require("fsspec.core", purpose=f"checkpoints in {url}")
        found = self._call("opening", lambda: fsspec.url_to_fs(self.url))
        self.files: Any = found[0]
        self.path: str = found[1].rstrip("/")

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ObjectDirectory, (self.url,)

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectDirectory) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> ObjectDirectory:
        return ObjectDirectory(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def parent(self) -> ObjectDirectory:
        """The directory that holds this one."""
        return ObjectDirectory(self.url.rsplit("/", 1)[0])

    def _call(self, doing: str, function: Callable[[], Result]) -> Result:
        """Call the store, and turn its own error types into one."""
        try:
            return function()
        except FileNotFoundError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{type(error).__name__} while {doing} {self.url}: {error}",
                flags=["--save", "--load"],
                fix="check the URL, the credentials and the network",
            ) from error

    # Reading --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[StoredObject]:
        """Open an object; FileNotFoundError if there is none."""
        path = f"{self.path}/{name}"
        self.files.invalidate_cache(path)
        info = self._call("reading", lambda: self.files.info(path))
        yield StoredObject(self, path, int(info["size"]))

    def has(self, name: str) -> bool:
        """Whether an object is there."""
        return bool(self._call("reading", lambda: self.files.exists(f"{self.path}/{name}")))

    def time_of(self, name: str) -> float:
        """Return when an object was written, in seconds; 0 if the store does not keep it."""
        try:
            return float(self.files.modified(f"{self.path}/{name}").timestamp())
        except (NotImplementedError, FileNotFoundError):
            return 0.0

    def names(self) -> list[str]:
        """Return the names in this directory; empty if there is no such directory."""

        def look() -> list[str]:
            self.files.invalidate_cache()
            try:
                found = self.files.ls(self.path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

        return self._call("listing", look)

    # Writing --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writer(self, name: str, num_bytes: int) -> Iterator[Callable[[Any], object]]:
        """Write an object piece by piece; it appears when the block ends without an error."""
        doing = f"writing {num_bytes} bytes of {name} to"
        self._call(doing, lambda: self.files.makedirs(self.path, exist_ok=True))
        file = self._call(doing, lambda: self.files.open(f"{self.path}/{name}", "wb"))
        try:
            yield lambda data: self._call(doing, lambda: file.write(data))
        except BaseException:
            file.discard() if hasattr(file, "discard") else file.close()
            raise
        self._call(doing, file.close)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""

        def put() -> None:
            self.files.makedirs(self.path, exist_ok=True)
            self.files.pipe_file(f"{self.path}/{name}", data)

        self._call(f"writing {len(data)} bytes of {name} to", put)

    def remove(self, *, first: str) -> None:
        """Delete everything here, `first` before the others."""

        def delete() -> None:
            if self.files.exists(f"{self.path}/{first}"):
                self.files.rm_file(f"{self.path}/{first}")
            if self.files.exists(self.path):
                self.files.rm(self.path, recursive=True)

        self._call("deleting", delete)


@dataclass(frozen=True)
class StoredObject:
    """An object, read by ranges; see `durable.OpenFile`."""

    directory: ObjectDirectory
    path: str
    size: int

    def read_into(self, into: memoryview, position: int) -> None:
        if not len(into):
            return
        end = position + len(into)
        data = self.directory._call(
            f"reading bytes {position} to {end - 1} of {self.path} from",
            lambda: self.directory.files.cat_file(self.path, start=position, end=end),
        )
        if len(data) != len(into):
            raise CheckpointError(
                f"{self.path} ends at byte {position + len(data)}; byte {end} is needed."
            )
        into[:] = data

    def forget_cached(self) -> None:
        """Do nothing: objects are not cached."""


StoragePath = Path | ObjectDirectory
"""Location of a checkpoint or a save directory."""


def storage_path(where: str | os.PathLike[str] | ObjectDirectory) -> StoragePath:
    """Return a directory of this machine, or of an object store for a URL."""
    if isinstance(where, ObjectDirectory):
        return where
    return ObjectDirectory(str(where)) if is_url(where) else Path(where)
