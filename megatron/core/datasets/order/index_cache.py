"""Index arrays on disk: one process builds them for each directory, the others read them.

No rank is special and there is no barrier. The first process takes a file lock and builds; the
others wait for the lock and then find the files. The kernel frees the lock when its holder dies.
If the directory cannot be written or locked, every process builds in memory. All builders make the
same bytes, so a race costs only time.

A cache is never trusted: a process that maps it first compares a checksum (CRC-32) of every 16 MiB,
and builds again if one differs. So the files need no fsync.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.corpus.token_file import AtomicFile
from megatron.core.foundation.errors import DataError

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_REPORT_EVERY_S = 30.0
_CHUNK_BYTES = 1 << 24
"""Bytes under one checksum."""


@dataclass(frozen=True)
class Expected:
    """Type and shape that a cached array must have to be used."""

    dtypes: tuple[type[np.number], ...]
    """Allowed types."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class IndexCache:
    """The cached index arrays of one dataset.

    Args:
        directory: created if needed; None keeps everything in memory.
        stem: beginning of all file names: "{md5}-{class}-{split}".
        description: text of everything that determines the arrays; `stem` begins with its md5.
    """

    directory: str | None
    stem: str
    description: str

    def path(self, name: str) -> str:
        """Return the file of one array, or of the description."""
        assert self.directory is not None
        return os.path.join(self.directory, f"{self.stem}-{name}")

    def load_or_build(
        self, build: Callable[[], dict[str, np.ndarray]], expected: Mapping[str, Expected]
    ) -> dict[str, np.ndarray]:
        """Return the arrays, mapped from the cache if they exist and are valid.

        Args:
            build: makes all arrays; called at most once, by at most one process at a time.
            expected: name -> type and shape; a cached array that differs is built again.
        """
        if self.directory is None:
            return build()
        arrays = self._load(expected)
        if arrays is not None:
            return arrays
        with self._only_one():
            arrays = self._load(expected)
            if arrays is not None:
                return arrays
            arrays = build()
            if not self._store(arrays):
                return arrays
        # Mapped, so that processes share the pages; its checksum was computed by the write.
        return self._load(expected, is_our_own=True) or arrays

    def _load(
        self, expected: Mapping[str, Expected], *, is_our_own: bool = False
    ) -> dict[str, np.ndarray] | None:
        checksums = self._checksums()
        if checksums is None:
            return None
        arrays = {}
        for name, wanted in expected.items():
            path = self.path(f"{name}.npy")
            try:
                array = _mapped_array(path, wanted)
            except (ValueError, OSError) as error:
                logger.warning("index cache %s cannot be read (%s): built again", path, error)
                return None
            if not is_our_own and checksums.get(name) != checksums_of(array):
                logger.warning("index cache %s has changed on disk: built again", path)
                return None
            arrays[name] = array
        return arrays

    def _checksums(self) -> dict[str, list[int]] | None:
        """Return the checksums of the arrays; None without a complete cache."""
        try:
            with open(self.path("crc32.json")) as file:
                found = json.load(file)
            with open(self.path("description.txt")) as text:
                described = text.read()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("index cache %s cannot be read (%s): built again", self.stem, error)
            return None
        if described != self.description or not isinstance(found, dict):
            logger.warning("index cache %s was made of something else: built again", self.stem)
            return None
        return found

    def _store(self, arrays: Mapping[str, np.ndarray]) -> bool:
        try:
            for name, array in arrays.items():
                file = AtomicFile(self.path(f"{name}.npy"))
                np.lib.format.write_array(file, array, allow_pickle=False)
                file.rename()
            self._store_text("description.txt", self.description)
            # Written last: if this file exists, all files do.
            sums = {name: checksums_of(array) for name, array in arrays.items()}
            self._store_text("crc32.json", json.dumps(sums))
        except (DataError, OSError) as error:
            logger.warning("index cache not written, the index is kept in memory: %s", error)
            return False
        return True

    def _store_text(self, name: str, text: str) -> None:
        file = AtomicFile(self.path(name))
        file.write(text.encode())
        file.rename()

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        """Hold the lock of this cache entry, or continue without it where locks do not work."""
        lock = None
        try:
            os.makedirs(str(self.directory), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(self.path("lock"), flags, 0o666)
            _wait_for_lock(lock, self.path("lock"))
        except OSError as error:
            logger.info("no lock in %s (%s): building without one", self.directory, error)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)


def _mapped_array(path: str, wanted: Expected) -> np.ndarray:
    """Map an array, which must have one of the wanted types and the wanted shape.

    Raises:
        ValueError: the file contains another array, or is cut off.
    """
    array = np.lib.format.open_memmap(path, mode="r")
    if array.dtype not in wanted.dtypes or array.shape != wanted.shape:
        raise ValueError(f"no array {np.dtype(wanted.dtypes[0])} {wanted.shape}")
    return array


def _wait_for_lock(descriptor: int, path: str) -> None:
    begun = reported = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            waited = reported - begun
            logger.warning("waiting %.0f s for another process to build %s", waited, path[:-5])
        time.sleep(_POLL_S)


def checksums_of(array: np.ndarray) -> list[int]:
    """Return the CRC-32 of every 16 MiB of an array, on several threads if there are many."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    chunks = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
    if len(chunks) <= 2:
        return [*map(zlib.crc32, chunks)]
    with ThreadPoolExecutor(max_workers=min(8, len(chunks))) as pool:
        return [*pool.map(zlib.crc32, chunks)]


class Fingerprinted:
    """A dataset whose index arrays follow from `unique_identifiers`, and are named after them.

    Pickling stores mapped arrays as the names of their files, without a copy. The cached property
    `_order` of a dataset is computed again.
    """

    unique_identifiers: OrderedDict[str, Any]
    """Everything that the index arrays depend on, in a fixed order."""

    @functools.cached_property
    def unique_description(self) -> str:
        """`unique_identifiers` as text: indented JSON, in the order given."""
        made_from = self.unique_identifiers
        return json.dumps(made_from, indent=4, default=lambda thing: thing.unique_identifiers)

    @functools.cached_property
    def unique_description_hash(self) -> str:
        """The md5 that names their files."""
        text = self.unique_description.encode("utf-8")
        return hashlib.md5(text, usedforsecurity=False).hexdigest()

    def index_cache(self, directory: str | None, split: str) -> IndexCache:
        """Return the place of the index arrays of one split."""
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{split}"
        return IndexCache(directory=directory, stem=stem, description=self.unique_description)

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: _MappedFile(str(value.filename))
            if isinstance(value, np.memmap) and value.filename is not None
            else value
            for key, value in self.__dict__.items()
            if key != "_order"
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            self.__dict__[key] = (
                np.load(value.path, mmap_mode="r", allow_pickle=False)
                if isinstance(value, _MappedFile)
                else value
            )


@dataclass(frozen=True)
class _MappedFile:
    path: str
