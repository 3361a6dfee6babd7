"""Corpora at a URL (s3://, gs://, ...): the index is copied once, tokens are read in blocks.

Each fetched block of the token file is kept in a local folder, named after the address, size and
version of the object, so that all processes of a machine, and the next run, read it from there.
Each block has a checksum; a damaged block is fetched again. The folder grows up to the size of the
data that is read; delete it when no run uses it. No torch import.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zlib

import numpy as np

from megatron.core.datasets.corpus.token_file import AtomicFile
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.optional_imports import require

BLOCK_BYTES = 1 << 20
"""Bytes fetched at a time: a request costs as much as transferring about this much."""
_HELD_BLOCKS = 16
_CHECKSUM_BYTES = 4


def is_url(path: str) -> bool:
    """Return whether a corpus is not on a mounted file system."""
    return "://" in path


class StoredObject:
    """One object of a store, and the folder of its blocks.

    Args:
        url: anything that fsspec opens.
        cache: folder of all copies.
    Raises:
        ConfigError: no folder was named.
        DataError: there is no such object, or the store cannot be reached.
        MissingExtraError: fsspec is not installed.
    """

    def __init__(self, url: str, cache: str | None) -> None:
        if cache is None:
            raise ConfigError(
                f"{url} is in an object store, and no folder for local copies is named.",
                rule="the index and the blocks that were read are kept locally",
                flags=["--object-storage-cache-path"],
                fix="name a folder on a local disk",
            )
        self.url = url
        self._open = require("fsspec", purpose=f"reading {url}").core.url_to_fs
        try:
            system, path = self._open(url)
            self.num_bytes = int(system.info(path)["size"])
            version = str(system.ukey(path))
        except Exception as error:  # every store raises its own kinds
            raise _unreadable(url, error) from error
        name = hashlib.blake2b(f"{url} {self.num_bytes} {version}".encode(), digest_size=16)
        self.folder = os.path.join(cache, name.hexdigest())

    def fetch(self, begin: int, end: int) -> bytes:
        """Return bytes from the store itself."""
        try:
            # Opened again in each process: connections do not survive a fork.
            system, path = self._open(self.url)
            data: bytes = system.cat_file(path, start=begin, end=end)
        except Exception as error:
            raise _unreadable(self.url, error) from error
        if len(data) != end - begin:
            raise DataError(
                f"{self.url}: received {len(data)} bytes instead of {end - begin}.",
                rule="a corpus must not change while it is in use",
                flags=["--data-path"],
                fix="restore the object and start again",
            )
        return data

    def block(self, number: int) -> bytes:
        """Return block `number` of the object, from the folder if its copy there is intact."""
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.num_bytes)
        path = os.path.join(self.folder, f"{number:08d}")
        try:
            with open(path, "rb") as file:
                kept = file.read()
            data, checksum = kept[:-_CHECKSUM_BYTES], kept[-_CHECKSUM_BYTES:]
            if len(data) == end - begin and zlib.crc32(data) == int.from_bytes(checksum, "little"):
                return data
        except OSError:
            pass
        data = self.fetch(begin, end)
        self._keep(path, data + zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little"))
        return data

    def full(self) -> str:
        """Return a local copy of the whole object."""
        path = os.path.join(self.folder, "whole")
        # Written under another name and renamed, so an existing copy is complete.
        if not (os.path.isfile(path) and os.path.getsize(path) == self.num_bytes):
            copy = AtomicFile(path)
            for begin in range(0, self.num_bytes, 64 * BLOCK_BYTES):
                copy.write(self.fetch(begin, min(begin + 64 * BLOCK_BYTES, self.num_bytes)))
            copy.rename()
        return path

    def _keep(self, path: str, content: bytes) -> None:
        try:
            file = AtomicFile(path)
            file.write(content)
            file.rename()
        except (DataError, OSError):
            pass  # a full disk costs time, not the run


class StoredTokens:
    """The tokens of an object, read in blocks. A `TokenReader`."""

    buffer: None = None

    def __init__(self, stored: StoredObject) -> None:
        self._block = functools.lru_cache(maxsize=_HELD_BLOCKS)(stored.block)

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Return a copy of `count` tokens from byte `offset`."""
        end = offset + count * np.dtype(dtype).itemsize
        pieces = []
        for number in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            begin = number * BLOCK_BYTES
            pieces.append(self._block(number)[max(offset - begin, 0) : end - begin])
        return np.frombuffer(b"".join(pieces), dtype=dtype, count=count)


def _unreadable(url: str, error: Exception) -> DataError:
    return DataError(
        f"{url} cannot be read: {type(error).__name__}: {error}.",
        rule="a corpus in an object store is a .bin and an .idx object",
        flags=["--data-path"],
        fix="check the address, the permissions and the network, and that fsspec's library for "
        "this store is installed",
    )
