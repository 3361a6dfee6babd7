"""The input files, their order and formats, and the part that one shard reads.

A name is a file, a folder (all the documents below it), a pattern, or a URL that fsspec supports.
No torch import.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.optional_imports import require

COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


class InputFormat(Enum):
    """Format of the documents in a file."""

    jsonl = "jsonl"
    """A JSON object on each line."""
    parquet = "parquet"
    """A row is a document; a column is a key."""
    text = "text"
    """The whole file is one document."""
    text_lines = "text-lines"
    """A line of text is a document."""


_FORMAT_OF_SUFFIX = {
    ".jsonl": InputFormat.jsonl,
    ".json": InputFormat.jsonl,
    ".ndjson": InputFormat.jsonl,
    ".parquet": InputFormat.parquet,
    ".pq": InputFormat.parquet,
    ".txt": InputFormat.text,
    ".text": InputFormat.text,
    ".md": InputFormat.text,
    ".rst": InputFormat.text,
}


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file and the part of it that is read."""

    path: str
    format: InputFormat
    size: int
    """Bytes as stored, 0 if unknown (pipes, some URLs)."""
    modified_ns: int
    """Time of the last change, 0 if unknown."""
    first_byte: int = 0
    """Lines that begin before it belong to another shard."""
    end_byte: int | None = None
    """Lines that begin there or later belong to another shard; None: the end of the file."""

    @property
    def can_be_cut(self) -> bool:
        """Whether a process can read lines from the middle of it."""
        return (
            self.format in (InputFormat.jsonl, InputFormat.text_lines)
            and "://" not in self.path
            and not self.path.endswith(COMPRESSION_SUFFIXES)
            and os.path.isfile(self.path)
        )


def format_of(path: str) -> InputFormat | None:
    """Return the format by the suffix, or None for an unknown suffix."""
    for suffix in COMPRESSION_SUFFIXES:
        path = path.removesuffix(suffix)
    return _FORMAT_OF_SUFFIX.get(os.path.splitext(path)[1].lower())


def expand_inputs(inputs: Sequence[str], format: InputFormat | None = None) -> list[InputFile]:
    """Expand names into files: in the order of the names, the files of each name sorted by path.

    Args:
        inputs: files, folders, patterns or URLs.
        format: format of all files. None decides by the suffix: a named file with an unknown suffix
            is JSON lines; a folder is replaced by its JSON-lines and parquet files or, if it has
            none, by its text files.
    Raises:
        DataError: no file belongs to one of the names.
    """
    files: list[InputFile] = []
    for name in inputs:
        if "://" in name and not name.startswith("file://"):
            found = _remote_files(name, format)
        else:
            found = _local_files(name.removeprefix("file://"), format)
        if not found:
            kinds = ".jsonl, .json, .ndjson and .parquet, or .txt, .md and .rst,"
            raise DataError(
                f"{name}: no such file, and no file matches it.",
                rule=f"a file, a pattern, a URL, or a folder of {kinds} files (compressed or not)",
                flags=["--input", "--input-format"],
                fix="check the path; for plain text under other names add --input-format text",
            )
        files += found
    return files


def _local_files(name: str, format: InputFormat | None) -> list[InputFile]:
    if os.path.isdir(name):
        entries = [
            os.path.join(folder, entry) for folder, _, files in os.walk(name) for entry in files
        ]
        paths = _documents_of(entries, format)
    elif os.path.exists(name):
        paths = [name]
    else:
        paths = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
    found = []
    for path in paths:
        status, is_file = os.stat(path), os.path.isfile(path)
        size, modified_ns = (status.st_size, status.st_mtime_ns) if is_file else (0, 0)
        kind = format or format_of(path) or InputFormat.jsonl
        found.append(InputFile(path=path, format=kind, size=size, modified_ns=modified_ns))
    return found


def _documents_of(paths: Iterable[str], format: InputFormat | None) -> list[str]:
    """Return the files of a folder that are read: records, or text if it has no records."""
    named = [(path, format_of(path)) for path in sorted(paths)]
    named = [(path, kind) for path, kind in named if not os.path.basename(path).startswith(".")]
    if format in (InputFormat.text, InputFormat.text_lines):
        return [path for path, _ in named]
    records = (InputFormat.jsonl, InputFormat.parquet) if format is None else (format,)
    found = [path for path, kind in named if kind in records]
    if not found and format is None:
        found = [path for path, kind in named if kind is InputFormat.text]
    return found


def _remote_files(name: str, format: InputFormat | None) -> list[InputFile]:
    system, path = remote_file_system(name)
    scheme = name.split("://")[0]
    try:
        if any(sign in path for sign in "*?["):
            paths = sorted(system.glob(path))
        elif system.isdir(path) and not system.isfile(path):
            paths = _documents_of(system.find(path), format)
        else:
            paths = [path] if system.exists(path) else []
        sizes = [int(system.info(path).get("size") or 0) for path in paths]
    except Exception as error:  # each file system has its own exceptions
        raise unreadable(name, error) from error
    found = []
    for path, size in zip(paths, sizes, strict=True):
        # File systems of fsspec return paths with or without their scheme.
        url = path if "://" in path else f"{scheme}://{path.lstrip('/')}"
        kind = format or format_of(url) or InputFormat.jsonl
        found.append(InputFile(path=url, format=kind, size=size, modified_ns=0))
    return found


def remote_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL and the path within it.

    Raises:
        MissingExtraError: fsspec is not installed.
        DataError: fsspec does not support the scheme or lacks the library for it.
    """
    fsspec = require("fsspec", purpose=f"reading {url}")
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise unreadable(url, error) from error
    return system, path


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a file that cannot be opened or read."""
    return DataError(
        f"{path} cannot be read: {type(error).__name__}: {error}.",
        rule="an input must be there and readable from start to end",
        flags=["--input"],
        fix="check the path, its permissions and, for a URL, the network",
    )


def share_of(files: Sequence[InputFile], shard: int, num_shards: int) -> list[InputFile]:
    """Return the part of the files that one of several shards reads.

    The bytes of all files, one after the other, are cut into `num_shards` equal ranges. A shard
    reads the lines that begin in its range; a file that cannot be cut belongs to the shard of its
    first byte. So the joined shards contain the same documents in the same order as a single run.

    Raises:
        ConfigError: there is no such shard.
    """
    if not 0 <= shard < num_shards:
        raise ConfigError(
            f"shard {shard} of {num_shards}.",
            rule="shards are numbered from 0",
            flags=["--num-shards", "--rank", "--world-size"],
        )
    total = sum(max(file.size, 1) for file in files)
    begin, end = total * shard // num_shards, total * (shard + 1) // num_shards
    share, position = [], 0
    for file in files:
        size = max(file.size, 1)
        if file.can_be_cut:
            first, last = max(begin - position, 0), min(end - position, size)
            if first < last:
                end_byte = None if last == size else last
                share.append(replace(file, first_byte=first, end_byte=end_byte))
        elif begin <= position < end:
            share.append(file)
        position += size
    return share
