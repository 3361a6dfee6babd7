"""Convert lines, rows and files into documents, and describe every fault.

No torch import.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.datasets.preprocessing.inputs import InputFormat, unreadable
from megatron.core.datasets.preprocessing.units import LONGEST_LINE_BYTES, Unit, read_document
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import has, require

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadDocumentError(Exception):
    """Raised for faulty input. `reason` is one of few texts, `detail` describes this case."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True)
class BadDocument:
    """A document that is left out, and the reason."""

    path: str
    number: int
    """Row of the file, or line of the unit, from 1; 0 if the file is the document."""
    reason: str
    detail: str


Texts = dict[str, list[str]]
"""Key -> the texts of one document, one for each sequence."""


@dataclass(kw_only=True)
class Documents:
    """The documents of a unit."""

    texts: list[Texts] = field(default_factory=list)
    positions: list[tuple[str, int]] = field(default_factory=list)
    """Path and number of each document, as in `BadDocument`."""
    bad: list[BadDocument] = field(default_factory=list)
    num_lines: int = 0
    """Lines, rows or files, including blank and faulty ones."""


def documents_of(
    unit: Unit,
    keys: Sequence[str],
    *,
    parse: Callable[[Mapping[str, object], Sequence[str]], Texts] | None = None,
    longest_line_bytes: int = LONGEST_LINE_BYTES,
) -> Documents:
    """Read the documents of a unit.

    Args:
        unit: from `units.read_units`.
        keys: JSON members or columns that hold text; plain text has one.
        parse: turns an object into texts; None takes the texts under `keys`.
        longest_line_bytes: a longer line is a fault and is not kept in memory.
    Raises:
        DataError: the file changed or cannot be read.
    """
    found = Documents()
    spellings = [(key, b'"%s"' % key.encode()) for key in keys]
    data = None
    is_lines = unit.rows is None and not unit.whole_files and not unit.is_overlong
    if is_lines and (unit.data is not None or unit.end - unit.start <= longest_line_bytes):
        data = _data_of(unit)
    if parse is None and unit.format is InputFormat.jsonl and data is not None:
        usual = None
        if len(data) <= longest_line_bytes:
            usual = _usual_documents(unit, data, spellings)
        if usual is not None:
            return usual
    for path, number, content in _contents(unit, data, found, longest_line_bytes):
        try:
            if isinstance(content, BadDocumentError):
                raise content
            if unit.format in (InputFormat.text, InputFormat.text_lines):
                texts = {keys[0]: [_decoded(content)]}
            else:
                document = content
                if isinstance(content, bytes):
                    document = _parse_object(content)
                    for key, spelling in spellings:
                        # Counting bytes is cheap; only lines with more of them are parsed again.
                        if content.count(spelling) > 1:
                            _refuse_duplicate(content, key)
                texts = (parse or _texts_of)(document, keys)
        except BadDocumentError as error:
            found.bad.append(BadDocument(path, number, error.reason, error.detail))
        else:
            found.texts.append(texts)
            found.positions.append((path, number))
    return found


def _contents(
    unit: Unit, data: bytes | None, found: Documents, longest: int
) -> Iterator[tuple[str, int, Any]]:
    """Yield (path, number, content) of each possible document.

    A content is bytes, the values of a row, or an error.
    """
    too_long = BadDocumentError("too long", f"more than {longest:,} bytes")
    if unit.rows is not None:
        found.num_lines = len(unit.rows)
        for number, row in enumerate(unit.rows, unit.start + 1):
            yield unit.path, number, row
    elif unit.whole_files:
        found.num_lines = len(unit.whole_files)
        for path in unit.whole_files:
            content, is_complete = read_document(path, longest)
            content = content.removeprefix(BYTE_ORDER_MARK)
            yield path, 0, content if is_complete else too_long
    elif unit.is_overlong:
        found.num_lines = 1
        yield unit.path, 1, too_long
    else:
        lines = _bounded_lines(unit, longest) if data is None else iter(_split(data))
        for number, line in enumerate(lines, 1):
            found.num_lines = number
            # Ends of lines of every system, and blank lines, are white space to JSON.
            if (line := line.rstrip(b"\r")) and not line.isspace():
                yield unit.path, number, line if len(line) <= longest else too_long


def _data_of(unit: Unit) -> bytes:
    """Return the bytes of a unit of lines."""
    data = unit.data
    if data is None:
        size = unit.end - unit.start
        try:
            with open(unit.path, "rb") as file:
                file.seek(unit.start)
                data = file.read(size)
        except OSError as error:
            raise unreadable(unit.path, error) from error
        if len(data) != size:
            raise DataError(
                f"{unit.path}: the file ended at byte {unit.start + len(data):,}, "
                f"{unit.end:,} were there when the run began.",
                rule="an input must not change while it is read",
                flags=["--input"],
            )
    return data.removeprefix(BYTE_ORDER_MARK) if unit.start == 0 else data


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _bounded_lines(unit: Unit, longest: int) -> Iterator[bytes]:
    """Yield the lines of a large unit; a line that is too long is cut after `longest` + 1 bytes."""
    size = unit.end - unit.start
    try:
        with open(unit.path, "rb") as file:
            file.seek(unit.start)
            while size > 0 and (line := file.readline(longest + 1)):
                size -= len(line)
                yield line.rstrip(b"\n")
                while len(line) > longest and not line.endswith(b"\n"):
                    line = file.readline(longest + 1)
                    size -= len(line)
    except OSError as error:
        raise unreadable(unit.path, error) from error


def _number(digits: str) -> float:
    """Read an integer; one of thousands of digits, which Python refuses, as infinity."""
    return int(digits) if len(digits) < 4000 else float(digits)


_decoder: Any = json.JSONDecoder(parse_int=_number)
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _parse_plainly(line: bytes) -> Any:
    """Read a line that is one JSON value and nothing else, or raise ValueError.

    It takes a third of the time of `json.loads`, which also skips white space around the value.
    """
    decoded = line.decode()
    try:
        value, end = _scan(decoded, 0)
    except StopIteration:
        raise ValueError from None
    if end != len(decoded):
        raise ValueError
    return value


@functools.cache
def _quick_parser() -> Callable[[bytes], Any]:
    """Return the fastest parser of usual lines: orjson takes a third of the json module's time.

    `_parse_object` parses lines again that orjson refuses; it accepts all lines that orjson accepts
    (except for nesting of about a thousand levels, where the limits differ by a few).
    """
    if has("orjson"):
        parse: Callable[[bytes], Any] = require("orjson", purpose="reading JSON lines").loads
        return parse
    return _parse_plainly


def _usual_documents(
    unit: Unit, data: bytes, spellings: Sequence[tuple[str, bytes]]
) -> Documents | None:
    """Return the documents of a unit whose lines are all usual, read together.

    None if a line is unusual: then the caller reads lines one by one and describes every fault.
    """
    lines, columns = _split(data), []
    try:
        documents = [*map(_quick_parser(), lines)]
        for key, spelling in spellings:
            column = [document[key] for document in documents]
            once = [line.count(spelling) for line in lines].count(1)
            if once != len(lines) or not {*map(type, column)} <= {str}:
                return None
            for text in column:
                if not text.isascii():
                    text.encode()
            columns.append(column)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    keys = [key for key, _ in spellings]
    return Documents(
        texts=[
            {key: [text] for key, text in zip(keys, texts, strict=True)}
            for texts in zip(*columns, strict=True)
        ],
        positions=[(unit.path, number) for number in range(1, len(lines) + 1)],
        num_lines=len(lines),
    )


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        document = _decoder.decode(_decoded(line))
    except json.JSONDecodeError as error:
        raise BadDocumentError("not JSON", f"{error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise BadDocumentError("not JSON", str(error)) from None
    if not isinstance(document, dict):
        raise BadDocumentError("not an object", f"found {type(document).__name__}")
    return document


def _refuse_duplicate(line: bytes, key: str) -> None:
    """Refuse a line with a repeated key, because it is ambiguous."""
    objects: list[list[tuple[str, Any]]] = []
    json.loads(line, object_pairs_hook=objects.append)
    # The outermost object ends last.
    if [name for name, _ in objects[-1]].count(key) > 1:
        raise BadDocumentError(f"duplicate key {key!r}")


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError("not UTF-8", f"byte {error.start + 1}") from None


def _texts_of(document: Mapping[str, Any], keys: Sequence[str]) -> Texts:
    """Return the texts of one document: a key holds one text, or a list of them."""
    found = {}
    for key in keys:
        if key not in document:
            raise BadDocumentError(f"no key {key!r}", f"keys are {sorted(document)[:8]}")
        value = document[key]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadDocumentError(f"{key!r} is not text", f"found {type(value).__name__}")
        for text in texts:
            check_unicode(text)
        found[key] = texts
    return found


def check_unicode(text: str) -> None:
    """Refuse half a character (a lone surrogate): JSON can spell it, no tokenizer accepts it.

    Raises:
        BadDocumentError: names the position of the surrogate.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            detail = f"half of a surrogate pair at character {error.start + 1}"
            raise BadDocumentError("not Unicode", detail) from None
