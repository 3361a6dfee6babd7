"""Which files are read, in which order and as what; the part of them that one shard reads.

A name is a file, a folder (all the documents below it), a pattern, or a URL that fsspec knows.
No torch import.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.optional_imports import require

COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


class InputFormat(Enum):
    """How documents are in a file."""

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
    """Bytes as stored, 0 where that is not known (pipes, some URLs)."""
    modified_ns: int
    """Time of the last change, 0 where that is not known."""
    first_byte: int = 0
    """Lines that begin before it belong to another shard."""
    end_byte: int | None = None
    """Lines that begin there or later belong to another shard; None: the end of the file."""

    @property
    def is_remote(self) -> bool:
        """Whether fsspec reads it."""
        return "://" in self.path

    @property
    def can_be_cut(self) -> bool:
        """Whether a process can read lines from the middle of it."""
        return (
            self.format in (InputFormat.jsonl, InputFormat.text_lines)
            and not self.is_remote
            and not self.path.endswith(COMPRESSION_SUFFIXES)
            and os.path.isfile(self.path)
        )


def format_of(path: str) -> InputFormat | None:
    """Tell the format by the name, or None for an unknown one."""
    for suffix in COMPRESSION_SUFFIXES:
        path = path.removesuffix(suffix)
    return _FORMAT_OF_SUFFIX.get(os.path.splitext(path)[1].lower())


def expand_inputs(inputs: Sequence[str], format: InputFormat | None = None) -> list[InputFile]:
    """Turn names into files: arguments in their order, what each stands for sorted by path.

    Args:
        inputs: files, folders, patterns or URLs.
        format: of all of them. None goes by the suffix: a named file of an unknown suffix is
            JSON lines, and a folder stands for its JSON-lines and parquet files or, if it has none
            of them, for its files of text.
    Raises:
        DataError: one of them stands for nothing.
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
        paths = sorted(_documents_of(entries, format))
    elif os.path.exists(name):
        paths = [name]
    else:
        paths = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
    found = []
    for path in paths:
        status = os.stat(path)
        is_file = os.path.isfile(path)
        found.append(
            InputFile(
                path=path,
                format=format or format_of(path) or InputFormat.jsonl,
                size=status.st_size if is_file else 0,
                modified_ns=status.st_mtime_ns if is_file else 0,
            )
        )
    return found


def _documents_of(paths: Iterable[str], format: InputFormat | None) -> list[str]:
    """Return the files of a folder that it stands for: records, or text if it has no records."""
    paths = list(paths)
    found = [path for path in paths if _is_document(os.path.basename(path), format)]
    if found or format is not None:
        return found
    names = {path: os.path.basename(path) for path in paths}
    return [
        path
        for path, name in names.items()
        if format_of(name) is InputFormat.text and not name.startswith(".")
    ]


def _is_document(name: str, format: InputFormat | None) -> bool:
    """Whether a folder stands for this one of its files too."""
    if name.startswith("."):
        return False
    if format in (InputFormat.text, InputFormat.text_lines):
        return True
    return format_of(name) in (
        (InputFormat.jsonl, InputFormat.parquet) if not format else (format,)
    )


def _remote_files(name: str, format: InputFormat | None) -> list[InputFile]:
    system, path = remote_file_system(name)
    scheme = name.split("://")[0]
    try:
        if any(sign in path for sign in "*?["):
            paths = sorted(system.glob(path))
        elif system.isdir(path) and not system.isfile(path):
            paths = sorted(_documents_of(system.find(path), format))
        else:
            paths = [path] if system.exists(path) else []
        sizes = [int(system.info(path).get("size") or 0) for path in paths]
    except Exception as error:  # each file system has its own exceptions
        raise unreadable(name, error) from error
    # File systems of fsspec return paths with or without their scheme.
    urls = [path if "://" in path else f"{scheme}://{path.lstrip('/')}" for path in paths]
    return [
        InputFile(
            path=url,
            format=format or format_of(url) or InputFormat.jsonl,
            size=size,
            modified_ns=0,
        )
        for url, size in zip(urls, sizes, strict=True)
    ]


def remote_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL and the path within it.

    Raises:
        MissingExtraError: fsspec is not installed.
        DataError: fsspec does not know the scheme or lacks the library for it.
    """
    fsspec = require("fsspec", purpose=f"reading {url}")
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise unreadable(url, error) from error
    return system, path


def unreadable(path: str, error: Exception) -> DataError:
    """Say that a file could not be opened or read."""
    return DataError(
        f"{path} cannot be read: {type(error).__name__}: {error}.",
        rule="an input must be there and readable from start to end",
        flags=["--input"],
        fix="check the path, its permissions and, for a URL, the network",
    )


def share_of(files: Sequence[InputFile], shard: int, num_shards: int) -> list[InputFile]:
    """Return the part of the files that one of several shards reads.

    The bytes of all files, one after the other, are cut into `num_shards` equal ranges. A file
    that can be cut gives each shard the lines that begin in its range; any other file goes whole
    to the shard where it begins. So the shards, joined in their order, hold the documents of one
    run over everything in the same order, whoever worked on them.

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
                share.append(
                    InputFile(
                        path=file.path,
                        format=file.format,
                        size=file.size,
                        modified_ns=file.modified_ns,
                        first_byte=first,
                        end_byte=None if last == size else last,
                    )
                )
        elif begin <= position < end:
            share.append(file)
        position += size
    return share
