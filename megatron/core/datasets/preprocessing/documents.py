"""Lines, rows and files into documents, with every fault named.

No torch import.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from megatron.core.datasets.preprocessing.inputs import InputFormat, unreadable
from megatron.core.datasets.preprocessing.streams import read_document
from megatron.core.datasets.preprocessing.units import LONGEST_LINE_BYTES, Unit
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.optional_imports import has, require

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadDocumentError(Exception):
    """Something that is not a document; `reason` is one of few, `detail` is about this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True)
class BadDocument:
    """A document that is left out, and why."""

    path: str
    number: int
    """Row of the file, or line of the unit, from 1; 0 if the file is the document."""
    reason: str
    detail: str


Texts = dict[str, list[str]]
"""Key -> the texts of one document, one for each sequence."""


@dataclass(kw_only=True)
class Documents:
    """What a unit holds."""

    texts: list[Texts] = field(default_factory=list)
    positions: list[tuple[str, int]] = field(default_factory=list)
    """Of each document: its path and number, as in `BadDocument`."""
    bad: list[BadDocument] = field(default_factory=list)
    num_lines: int = 0
    """Lines, rows or files, blank and faulty ones included."""


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
        parse: turns an object into texts; `texts_of` by default.
        longest_line_bytes: a longer line is a fault and is not held.
    Raises:
        DataError: the file changed or cannot be read.
    """
    found = Documents()
    take = parse or texts_of
    is_plain = parse is None and unit.format is InputFormat.jsonl
    spellings = [(key, b'"%s"' % key.encode()) for key in keys]
    data = None
    if unit.rows is None and not unit.whole_files and not unit.is_overlong:
        data = _data_of(unit, longest_line_bytes)
    if is_plain and data is not None and len(data) <= longest_line_bytes:
        usual = _usual_documents(unit, data, spellings)
        if usual is not None:
            return usual
    for path, number, content in _contents(unit, data, found, longest_line_bytes):
        try:
            if isinstance(content, BadDocumentError):
                raise content
            if isinstance(content, dict):
                texts = take(content, keys)
            elif unit.format is InputFormat.jsonl:
                document = parse_object(content)
                for key, spelling in spellings:
                    # Counting bytes is cheap; parsing again is for the few with more of them.
                    if content.count(spelling) > 1:
                        refuse_duplicate(content, key)
                texts = take(document, keys)
            else:
                texts = {keys[0]: [_decoded(content)]}
        except BadDocumentError as error:
            found.bad.append(BadDocument(path, number, error.reason, error.detail))
        else:
            found.texts.append(texts)
            found.positions.append((path, number))
    return found


def _contents(
    unit: Unit, data: bytes | None, found: Documents, longest: int
) -> Iterator[tuple[str, int, bytes | dict[str, Any] | BadDocumentError]]:
    """Yield (path, number, content) of everything that may be a document."""
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
        for line, is_complete in _lines(unit, data, longest):
            found.num_lines += 1
            # Ends of lines of every system, and blank lines, are white space to JSON.
            if (line := line.rstrip(b"\r")) and not line.isspace():
                yield unit.path, found.num_lines, line if is_complete else too_long


def _data_of(unit: Unit, longest: int) -> bytes | None:
    """Return the bytes of a unit of lines; None if they may end with a line not to be held."""
    data = unit.data
    if data is None:
        size = unit.end - unit.start
        if size > longest:
            return None
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


def _lines(unit: Unit, data: bytes | None, longest: int) -> Iterator[tuple[bytes, bool]]:
    """Yield (line, whether it is complete)."""
    if data is None:
        try:
            with open(unit.path, "rb") as file:
                file.seek(unit.start)
                yield from _bounded_lines(file, unit.end - unit.start, longest)
        except OSError as error:
            raise unreadable(unit.path, error) from error
        return
    for line in _split(data):
        yield line, len(line) <= longest


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _bounded_lines(file: IO[bytes], size: int, longest: int) -> Iterator[tuple[bytes, bool]]:
    while size > 0 and (line := file.readline(longest)):
        size -= len(line)
        is_complete = line.endswith(b"\n") or len(line) < longest
        yield line.rstrip(b"\n") if is_complete else line[:80], is_complete
        while not (is_complete or line.endswith(b"\n") or not line):
            line = file.readline(longest)
            size -= len(line)


def _number(digits: str) -> float:
    """Read an integer; one of thousands of digits, which Python refuses, as infinity."""
    return int(digits) if len(digits) < 4000 else float(digits)


_decoder: Any = json.JSONDecoder(parse_int=_number)
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _parse_plainly(line: bytes) -> Any:
    """Read a line that is one JSON value and nothing else, or raise ValueError.

    A third of the time of `json.loads`, which looks for white space around the value.
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
    """Return what reads usual lines soonest; orjson takes a third of the standard library's time.

    What it refuses goes the long way, which reads all that it reads (but for nesting of a thousand
    levels, where the limits differ by a few).
    """
    if has("orjson"):
        parse: Callable[[bytes], Any] = require("orjson", purpose="reading JSON lines").loads
        return parse
    return _parse_plainly


def _usual_documents(
    unit: Unit, data: bytes, spellings: Sequence[tuple[str, bytes]]
) -> Documents | None:
    """Return the documents of lines that are all as most are, read together.

    None if one is not: then each goes the long way, which names every fault.
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


def parse_object(line: bytes) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        BadDocumentError: anything else, or a key that is in it twice.
    """
    try:
        document = _decoder.decode(_decoded(line))
    except json.JSONDecodeError as error:
        raise BadDocumentError("not JSON", f"{error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise BadDocumentError("not JSON", str(error)) from None
    if not isinstance(document, dict):
        raise BadDocumentError("not an object", f"found {type(document).__name__}")
    return document


def refuse_duplicate(line: bytes, key: str) -> None:
    """Refuse a line that spells a key twice: which of the two was meant, nobody knows.

    Raises:
        BadDocumentError: names the key.
    """
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


def texts_of(document: dict[str, object], keys: Sequence[str]) -> Texts:
    """Return the texts of one document.

    Raises:
        BadDocumentError: a key is missing or holds no text.
    """
    return {key: _texts(document, key) for key in keys}


def _texts(document: dict[str, Any], key: str) -> list[str]:
    if key not in document:
        raise BadDocumentError(f"no key {key!r}", f"keys are {sorted(document)[:8]}")
    value = document[key]
    if type(value) is str and value.isascii():
        return [value]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadDocumentError(f"{key!r} is not text", f"found {type(value).__name__}")
    for text in texts:
        check_unicode(text)
    return texts


def check_unicode(text: str) -> None:
    """Refuse half a character (a lone surrogate): JSON can spell it, no tokenizer accepts it.

    Raises:
        BadDocumentError: with its place.
    """
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            detail = f"half of a surrogate pair at character {error.start + 1}"
            raise BadDocumentError("not Unicode", detail) from None
