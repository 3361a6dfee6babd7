"""The input cut into units of about a megabyte: what one process works on at a time.

The cut depends on the files alone, so that the output does not depend on who works on them. Plain
local files are not read here: a unit names a range of bytes that ends with a line, and the worker
reads it. Everything else (compressed, remote, parquet) is read here and handed over.

No torch import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import IO, Any

from megatron.core.datasets.preprocessing.inputs import InputFile, InputFormat, unreadable
from megatron.core.datasets.preprocessing.streams import (
    KEPT_OF_OVERLONG,
    blocks_of,
    opened_file,
)
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import require

UNIT_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 29
"""A line longer than this is taken for a file that is not made of lines at all."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Consecutive documents of one file, or several small files of one document each."""

    file: int
    """Number of its (first) file."""
    path: str
    format: InputFormat
    start: int
    """Where it begins: bytes of the decompressed text; rows of a parquet file."""
    end: int
    """Where the next one begins."""
    data: bytes | None = None
    """Its lines; None: the worker reads bytes `start` to `end` of `path`."""
    rows: list[dict[str, Any]] | None = None
    """Its rows, from parquet."""
    whole_files: tuple[str, ...] = ()
    """Files of one document each, which the worker reads."""
    is_overlong: bool = False
    """It is one line that is too long to be held; `data` is its beginning."""
    consumed: int = field(compare=False, default=0)
    """Bytes of all files together, as stored, up to its end: for the progress bar."""

    @property
    def next_position(self) -> tuple[int, int]:
        """The (file, place in it) where reading continues after this unit."""
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
        files: as `inputs.share_of` returns them.
        keys: columns read from parquet.
        start: (file, place in it) of an earlier `Unit.next_position`, to continue from there.
        unit_bytes: wanted size.
        longest_line_bytes: a longer line is reported instead of being held in memory.
    Raises:
        DataError: a file cannot be read or decompressed, with the place that was reached.
    """
    before = [0]
    for file in files:
        before.append(before[-1] + file.size)
    number, start_position = start
    while number < len(files):
        file = files[number]
        if file.format is InputFormat.text:
            together = _small_texts(files, number, unit_bytes)
            yield Unit(
                file=number,
                path=file.path,
                format=file.format,
                start=0,
                end=0,
                whole_files=tuple(one.path for one in together),
                consumed=before[number + len(together)],
            )
            number += len(together)
            continue
        if file.format is InputFormat.parquet:
            units = _parquet_units(file, number, start_position, keys, unit_bytes)
        elif file.can_be_cut:
            units = _spans(file, number, start_position, unit_bytes)
        else:
            units = _stream_units(file, number, start_position, unit_bytes, longest_line_bytes)
        for unit in units:
            yield _with_progress(unit, before[number])
        number, start_position = number + 1, 0


def _with_progress(unit: Unit, before: int) -> Unit:
    object.__setattr__(unit, "consumed", before + unit.consumed)
    return unit


def _small_texts(files: Sequence[InputFile], first: int, unit_bytes: int) -> list[InputFile]:
    """Return consecutive text files that together are about one unit; at least one."""
    together, size = [], 0
    for file in takewhile(lambda one: one.format is InputFormat.text, files[first:]):
        together.append(file)
        size += max(file.size, 1)
        if size >= unit_bytes or len(together) == 256:
            break
    return together


# --- plain local files --------------------------------------------------------------------------


def _spans(file: InputFile, number: int, start_position: int, unit_bytes: int) -> Iterator[Unit]:
    try:
        with open(file.path, "rb") as opened:
            position = start_position or _line_begin(opened, file.first_byte)
            stop = file.size if file.end_byte is None else file.end_byte
            while position < stop:
                end = _line_begin(opened, min(position + unit_bytes, stop))
                yield Unit(
                    file=number,
                    path=file.path,
                    format=file.format,
                    start=position,
                    end=end,
                    consumed=end,
                )
                position = end
    except OSError as error:
        raise unreadable(file.path, error) from error


def _line_begin(opened: IO[bytes], position: int) -> int:
    """Return where the first line begins at or after a position."""
    if position == 0:
        return 0
    opened.seek(position - 1)
    while (piece := opened.readline(1 << 20)) and not piece.endswith(b"\n"):
        pass
    return opened.tell()


def lines_before(path: str, position: int) -> int:
    """Count the lines that begin before a byte of a plain file: only for a message."""
    count = 0
    with open(path, "rb") as opened:
        while position > 0 and (block := opened.read(min(position, 1 << 20))):
            count += block.count(b"\n")
            position -= len(block)
    return count


# --- compressed and remote files, pipes ---------------------------------------------------------


def _stream_units(
    file: InputFile, number: int, start_position: int, unit_bytes: int, longest: int
) -> Iterator[Unit]:
    position, held, to_skip = start_position, bytearray(), start_position
    overlong, dropped = b"", 0
    searched, stored = 0, 0

    def unit(data: bytes, size: int, is_overlong: bool = False) -> Unit:
        nonlocal position
        position += size
        return Unit(
            file=number,
            path=file.path,
            format=file.format,
            start=position - size,
            end=position,
            data=data,
            is_overlong=is_overlong,
            consumed=stored,
        )

    for block, seen in blocks_of(file.path):
        stored = seen
        if to_skip:
            skipped = min(to_skip, len(block))
            to_skip -= skipped
            block = block[skipped:]
        if overlong:  # the rest of a line that is left behind
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
                    # The line that crosses the mark is too long; those before it are not.
                    end = held.rfind(b"\n", 0, unit_bytes) + 1
                    if end:
                        yield unit(bytes(held[:end]), end)
                    overlong, dropped = bytes(held[end : end + KEPT_OF_OVERLONG]), searched - end
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


# --- parquet ------------------------------------------------------------------------------------


def _parquet_units(
    file: InputFile, number: int, start_position: int, keys: Sequence[str], unit_bytes: int
) -> Iterator[Unit]:
    parquet = require("pyarrow.parquet", purpose=f"reading {file.path}")
    group, row = 0, 0
    try:
        with opened_file(file.path) as raw:
            table = parquet.ParquetFile(raw)
            _check_columns(file.path, table.schema_arrow.names, keys)
            num_rows = table.metadata.num_rows
            for group in range(table.num_row_groups):
                described = table.metadata.row_group(group)
                if row + described.num_rows <= start_position:
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
                    if row <= start_position:
                        continue
                    yield Unit(
                        file=number,
                        path=file.path,
                        format=file.format,
                        start=begin,
                        end=row,
                        rows=batch.to_pylist(),
                        consumed=file.size * row // max(num_rows, 1),
                    )
    except DataError:
        raise
    except Exception as error:  # pyarrow's own, OSError, and those of remote file systems
        raise DataError(
            f"{file.path}, row group {group}, row {row + 1}: cannot be read: {error}.",
            rule="a parquet input must be complete and undamaged",
            flags=["--input"],
            fix="copy the file again",
        ) from error


def _check_columns(path: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    missing = [key for key in wanted if key not in found]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, found))}.",
            rule="each key is a column of a parquet input",
            flags=["--json-keys"],
        )


def sizes_are_known(files: Sequence[InputFile]) -> bool:
    """Whether the progress bar can tell how much is left."""
    return all(file.size > 0 or os.path.isfile(file.path) for file in files)
