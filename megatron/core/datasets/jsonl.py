"""Reading documents from JSON-lines files, plain or compressed, with every fault located.

No torch import.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from megatron.core.capabilities import require
from megatron.core.errors import DataError

BATCH_BYTES = 1 << 18
BATCH_LINES = 1000
LONGEST_LINE_BYTES = 1 << 29
"""A line longer than this is taken for a file that is not JSON lines at all."""

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst")


@dataclass(frozen=True)
class Line:
    """One line of a file, without its end."""

    number: int
    """From 1."""
    content: bytes
    is_complete: bool = True
    """False if only the beginning of an overlong line was kept."""


@dataclass
class LineBatch:
    """Some consecutive lines of one file: the unit of work of a process."""

    path: str
    lines: list[Line] = field(default_factory=list)


class BadLineError(Exception):
    """A line that is not a document; `reason` is one of few, `detail` is about this line."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def expand_inputs(inputs: Sequence[str]) -> list[str]:
    """Turn files, folders and glob patterns into files: arguments in order, matches sorted.

    Raises:
        DataError: one of them matches nothing.
    """
    files: list[str] = []
    for name in inputs:
        if os.path.isfile(name):
            found = [name]
        elif os.path.isdir(name):
            entries = sorted(os.listdir(name))
            found = [os.path.join(name, entry) for entry in entries if entry.endswith(_SUFFIXES)]
        else:
            found = sorted(path for path in glob.glob(name) if os.path.isfile(path))
        if not found:
            raise DataError(
                f"{name}: no such file, and no file matches it.",
                rule=f"a file, a pattern, or a folder of {', '.join(_SUFFIXES[:3])}, ... files",
                flags=["--input"],
                fix="check the path",
            )
        files += found
    return files


def open_lines(path: str) -> IO[bytes]:
    """Open a file for reading lines, decompressed by its suffix."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.endswith(".bz2"):
        return bz2.open(path, "rb")
    if path.endswith(".xz"):
        return lzma.open(path, "rb")
    if path.endswith(".zst"):
        opened: IO[bytes] = require("zstandard", purpose=f"reading {path}").open(path, "rb")
        return opened
    return open(path, "rb", buffering=1 << 20)


def read_batches(
    paths: Sequence[str], *, longest_line_bytes: int = LONGEST_LINE_BYTES
) -> Iterator[LineBatch]:
    """Read files one after the other; blank lines are left out.

    The cut into batches depends on the files only, never on who works on them.

    Raises:
        DataError: a compressed file is damaged.
    """
    for path in paths:
        batch, size, number = LineBatch(path), 0, 0
        try:
            with open_lines(path) as file:
                for number, line in enumerate(_lines(file, longest_line_bytes), 1):
                    content, is_complete = line
                    if not content.strip():
                        continue
                    batch.lines.append(Line(number, content, is_complete))
                    size += len(content)
                    if size >= BATCH_BYTES or len(batch.lines) >= BATCH_LINES:
                        yield batch
                        batch, size = LineBatch(path), 0
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path}: cannot be decompressed after line {number}: {error}.",
                rule="a compressed input must be complete",
                flags=["--input"],
                fix="copy the file again",
            ) from error
        if batch.lines:
            yield batch


def _lines(file: IO[bytes], longest: int) -> Iterator[tuple[bytes, bool]]:
    """Yield (line, whether it is complete); of an overlong line only the beginning."""
    while line := file.readline(longest):
        is_complete = line.endswith(b"\n") or len(line) < longest
        yield line.rstrip(b"\r\n") if is_complete else line[:80], is_complete
        while not (is_complete or line.endswith(b"\n") or not line):
            line = file.readline(longest)


def parse_document(line: Line, keys: Sequence[str]) -> dict[str, list[str]]:
    """Read the texts of one document.

    Args:
        line: a JSON object.
        keys: its members that hold text: a string, or a list of strings (several sequences).
    Returns:
        key -> its texts.
    Raises:
        BadLineError: anything else.
    """
    if not line.is_complete:
        raise BadLineError("too long")
    try:
        text = line.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLineError("not UTF-8", f"byte {error.start + 1} of the line") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLineError("not JSON", f"{error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise BadLineError("not JSON", str(error)) from None
    if not isinstance(document, dict):
        raise BadLineError("not an object", f"found {type(document).__name__}")
    return {key: _texts(document, key) for key in keys}


def _texts(document: dict[str, Any], key: str) -> list[str]:
    if key not in document:
        raise BadLineError(f"no key {key!r}", f"keys are {sorted(document)[:8]}")
    value = document[key]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadLineError(f"{key!r} is not text", f"found {type(value).__name__}")
    for text in texts:
        # JSON can spell half a character (a lone surrogate), which no tokenizer accepts.
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                detail = f"half of a surrogate pair at character {error.start + 1}"
                raise BadLineError("not Unicode", detail) from None
    return texts
