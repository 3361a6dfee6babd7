"""Files as blocks of decompressed bytes: local, remote, compressed; damage is located.

No torch import.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Iterator
from typing import IO, Any

from megatron.core.datasets.preprocessing.inputs import (
    COMPRESSION_SUFFIXES,
    remote_file_system,
    unreadable,
)
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import require

KEPT_OF_OVERLONG = 80
"""Bytes kept of a line or document that is too long to be held."""

_BLOCK_BYTES = 1 << 20
"""Read or decompressed at a time."""
_ZSTD_BYTES = 1 << 9
"""Given to the decompressor of zstandard at a time: four bytes can stand for a block of 128 KiB, so
one call returns 16 MiB at most. (A window above 128 MiB is refused by the library.)"""


def read_document(path: str, limit: int) -> tuple[bytes, bool]:
    """Read a file that is one document; return it and whether it was within the limit."""
    parts, size = [], 0
    for block, _ in blocks_of(path):
        parts.append(block)
        size += len(block)
        if size > limit:
            return parts[0][:KEPT_OF_OVERLONG], False
    return b"".join(parts), True


def blocks_of(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield (decompressed bytes, bytes read of the file so far)."""
    seen = 0
    try:
        with opened_file(path) as raw:
            for block in _decompressed(path, raw):
                seen += len(block)
                yield block, raw.tell() if raw.seekable() else seen
            if path.endswith(COMPRESSION_SUFFIXES) and raw.seekable() and not raw.tell():
                raise EOFError("the file holds nothing, not even a header")
    except DataError:
        raise
    except Exception as error:  # each decompressor and file system has its own exceptions
        if not path.endswith(COMPRESSION_SUFFIXES):
            raise unreadable(path, error) from error
        raise DataError(
            f"{path}: cannot be decompressed after {seen:,} bytes of text: {error}.",
            rule="a compressed input must be complete and undamaged",
            flags=["--input"],
            fix="copy the file again",
        ) from error


def opened_file(path: str) -> IO[bytes]:
    if "://" not in path:
        return open(path, "rb")
    system, inner = remote_file_system(path)
    opened: IO[bytes] = system.open(inner, "rb")
    return opened


def _decompressed(path: str, raw: IO[bytes]) -> Iterator[bytes]:
    if path.endswith(".zst"):
        yield from _zstd_blocks(path, raw)
        return
    wrappers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    wrap = next((wrappers[end] for end in wrappers if path.endswith(end)), None)
    stream = raw if wrap is None else wrap(raw)
    while block := stream.read(_BLOCK_BYTES):
        yield block


def _zstd_blocks(path: str, raw: IO[bytes]) -> Iterator[bytes]:
    # The library's own reader takes the end of a cut-off file for the end of the text.
    decompressor = require("zstandard", purpose=f"reading {path}").ZstdDecompressor()
    frame, is_complete = decompressor.decompressobj(), True
    ready: list[bytes] = []
    num_ready = 0
    while read := raw.read(_BLOCK_BYTES):
        for at in range(0, len(read), _ZSTD_BYTES):
            data = read[at : at + _ZSTD_BYTES]
            while data:
                if frame.eof:
                    frame = decompressor.decompressobj()
                ready.append(frame.decompress(data))
                num_ready += len(ready[-1])
                data, is_complete = frame.unused_data, frame.eof
                if num_ready >= _BLOCK_BYTES:
                    yield b"".join(ready)
                    ready, num_ready = [], 0
    if num_ready:
        yield b"".join(ready)
    if not is_complete:
        raise EOFError("the file ends before its last frame does")
