"""Read the input and cut it into units of about a megabyte: the work of one process at a time.

The cut depends only on the files, so that the output is the same whichever process works on a unit.
Plain local files are not read here: a unit names a range of bytes that ends with a line, and
the worker reads it. All other files (compressed, remote, parquet) are read here, and their lines or
rows are passed to the worker. Damage is reported with its place.

No torch import.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import IO, Any

from megatron.core.datasets.preprocessing.inputs import (
    COMPRESSION_SUFFIXES,
    InputFile,
    InputFormat,
    remote_file_system,
    unreadable,
)
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import require

UNIT_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 29
"""A file with a longer line is refused as a file without lines."""
_KEPT_OF_OVERLONG = 80
"""Bytes kept of an overlong line or document."""
_BLOCK_BYTES = 1 << 20
"""Bytes read or decompressed at a time."""
_ZSTD_BYTES = 1 << 9
"""Input of the zstandard decompressor at a time: four bytes can expand to a block of 128 KiB, so
one call returns 16 MiB at most. (The library refuses a window above 128 MiB.)"""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Consecutive documents of one file, or several small files of one document each."""

    file: int
    """Number of its (first) file."""
    path: str
    format: InputFormat
    start: int = 0
    """First byte of the decompressed text, or first row of a parquet file."""
    end: int = 0
    """Beginning of the next unit."""
    data: bytes | None = None
    """Lines of the unit; None: the worker reads bytes `start` to `end` of `path`."""
    rows: list[dict[str, Any]] | None = None
    """Rows of a parquet file."""
    whole_files: tuple[str, ...] = ()
    """Files of one document each, which the worker reads."""
    is_overlong: bool = False
    """The unit is one overlong line; `data` is the beginning of the line."""
    consumed: int = field(compare=False, default=0)
    """Stored bytes of all files up to its end, for the progress line."""

    @property
    def next_position(self) -> tuple[int, int]:
        """The (file, position in it) of the next unit."""
        return (self.file + len(self.whole_files), 0) if self.whole_files else (self.file, self.end)


def read_units(
    files: Sequence[InputFile],
    *,
    keys: Sequence[str],
    start: tuple[int, int] = (0, 0),
    unit_bytes: int = UNIT_BYTES,
    longest_line_bytes: int = LONGEST_LINE_BYTES,
) -> Iterator[Unit]:
    """Cut files into units, in order.

    Args:
        files: from `inputs.share_of`.
        keys: columns read from parquet.
        start: an earlier `Unit.next_position`, to continue from there.
        unit_bytes: wanted size of a unit.
        longest_line_bytes: a longer line is reported instead of being held in memory.
    Raises:
        DataError: a file cannot be read or decompressed; the message has the place.
    """
    before = [0, *accumulate(file.size for file in files)]
    number, place = start
    while number < len(files):
        file = files[number]
        make = functools.partial(Unit, file=number, path=file.path, format=file.format)
        if file.format is InputFormat.text:
            together = _small_texts(files[number : number + 256], unit_bytes)
            paths = tuple(one.path for one in together)
            number += len(together)
            yield make(whole_files=paths, consumed=before[number])
            continue
        if file.format is InputFormat.parquet:
            units = _parquet_units(file, make, before[number], place, keys, unit_bytes)
        elif file.can_be_cut:
            units = _spans(file, make, before[number], place, unit_bytes)
        else:
            units = _stream_units(file, make, before[number], place, unit_bytes, longest_line_bytes)
        yield from units
        number, place = number + 1, 0


def _small_texts(files: Sequence[InputFile], unit_bytes: int) -> list[InputFile]:
    """Return the first text files that together are about one unit; at least one."""
    together, size = [], 0
    for file in takewhile(lambda one: one.format is InputFormat.text, files):
        together.append(file)
        size += max(file.size, 1)
        if size >= unit_bytes:
            break
    return together


# --- plain local files --------------------------------------------------------------------------


def _spans(
    file: InputFile, make: Callable[..., Unit], before: int, place: int, unit_bytes: int
) -> Iterator[Unit]:
    try:
        with open(file.path, "rb") as opened:
            position = place or _line_begin(opened, file.first_byte)
            stop = file.size if file.end_byte is None else file.end_byte
            while position < stop:
                end = _line_begin(opened, min(position + unit_bytes, stop))
                yield make(start=position, end=end, consumed=before + end)
                position = end
    except OSError as error:
        raise unreadable(file.path, error) from error


def _line_begin(opened: IO[bytes], position: int) -> int:
    """Return the beginning of the first line at or after a position."""
    if position == 0:
        return 0
    opened.seek(position - 1)
    while (piece := opened.readline(1 << 20)) and not piece.endswith(b"\n"):
        pass
    return opened.tell()


def lines_before(file: InputFile) -> int:
    """Return how many lines begin before a shard's first line, for a message."""
    count, position = 0, file.first_byte
    last = b"\n"
    with open(file.path, "rb") as opened:
        while position > 0 and (block := opened.read(min(position, 1 << 20))):
            count += block.count(b"\n")
            position -= len(block)
            last = block[-1:]
    # If the range begins within a line, this line belongs to the previous shard.
    return count + (last != b"\n")


# --- compressed and remote files, pipes ---------------------------------------------------------


def _stream_units(
    file: InputFile,
    make: Callable[..., Unit],
    before: int,
    place: int,
    unit_bytes: int,
    longest: int,
) -> Iterator[Unit]:
    position, held, to_skip = place, bytearray(), place
    overlong, dropped = b"", 0
    searched, stored = 0, 0

    def unit(data: bytes, size: int, is_overlong: bool = False) -> Unit:
        nonlocal position
        begin, position = position, position + size
        consumed = before + stored
        return make(
            start=begin, end=position, data=data, is_overlong=is_overlong, consumed=consumed
        )

    for block, seen in blocks_of(file.path):
        stored = seen
        if to_skip:
            skipped = min(to_skip, len(block))
            to_skip -= skipped
            block = block[skipped:]
        if overlong:  # skip the rest of an overlong line
            end = block.find(b"\n") + 1
            dropped += end or len(block)
            if not end:
                continue
            yield unit(overlong, dropped, is_overlong=True)
            overlong, dropped, block = b"", 0, block[end:]
        held += block
        while len(held) >= unit_bytes:
            end = held.find(b"\n", max(searched, unit_bytes - 1)) + 1
            if not end:
                searched = len(held)
                if searched > longest + unit_bytes:
                    # Only the line that crosses the limit is too long, not the lines before it.
                    end = held.rfind(b"\n", 0, unit_bytes) + 1
                    if end:
                        yield unit(bytes(held[:end]), end)
                    overlong, dropped = bytes(held[end : end + _KEPT_OF_OVERLONG]), searched - end
                    held.clear()
                    searched = 0
                break
            yield unit(bytes(held[:end]), end)
            del held[:end]
            searched = 0
    if overlong:
        yield unit(overlong, dropped, is_overlong=True)
    elif held:
        yield unit(bytes(held), len(held))


def read_document(path: str, limit: int) -> tuple[bytes, bool]:
    """Read a file that is one document; return it and whether it was within the limit."""
    parts, size = [], 0
    for block, _ in blocks_of(path):
        parts.append(block)
        size += len(block)
        if size > limit:
            return parts[0][:_KEPT_OF_OVERLONG], False
    return b"".join(parts), True


def blocks_of(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield (decompressed bytes, bytes read of the file so far)."""
    seen = 0
    try:
        with _opened(path) as raw:
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


def _opened(path: str) -> IO[bytes]:
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
    # The library's own reader takes the end of a truncated file for the end of the text.
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


# --- parquet ------------------------------------------------------------------------------------


def _parquet_units(
    file: InputFile,
    make: Callable[..., Unit],
    before: int,
    place: int,
    keys: Sequence[str],
    unit_bytes: int,
) -> Iterator[Unit]:
    parquet = require("pyarrow.parquet", purpose=f"reading {file.path}")
    group, row = 0, 0
    try:
        with _opened(file.path) as raw:
            table = parquet.ParquetFile(raw)
            columns = table.schema_arrow.names
            for key in keys:
                if key not in columns:
                    raise DataError(
                        f"{file.path} has no column {key!r}; it has "
                        f"{', '.join(map(repr, columns))}.",
                        rule="each key is a column of a parquet input",
                        flags=["--json-keys"],
                    )
            num_rows = max(table.metadata.num_rows, 1)
            for group in range(table.num_row_groups):
                described = table.metadata.row_group(group)
                if row + described.num_rows <= place:
                    row += described.num_rows
                    continue
                average = max(1, described.total_byte_size // max(described.num_rows, 1))
                batches = table.iter_batches(
                    batch_size=min(max(1, unit_bytes // average), 8192),
                    row_groups=[group],
                    columns=list(keys),
                    use_threads=False,
                )
                for batch in batches:
                    begin, row = row, row + batch.num_rows
                    if row > place:
                        consumed = before + file.size * row // num_rows
                        yield make(start=begin, end=row, rows=batch.to_pylist(), consumed=consumed)
    except DataError:
        raise
    except Exception as error:  # of pyarrow, the system, and remote file systems
        raise DataError(
            f"{file.path}, row group {group}, row {row + 1}: cannot be read: {error}.",
            rule="a parquet input must be complete and undamaged",
            flags=["--input"],
            fix="copy the file again",
        ) from error
