"""What is written so far, the journal beside it, and the final names at the end.

A run writes `PREFIX.bin.unfinished` and the lengths of its sequences and documents, and from time
to time a line into a journal: how far the input was read and how long each file was then. After a
kill at any moment the same command cuts the files back to the last line of the journal and goes
on; the output is that of an undisturbed run, to the byte. The final names appear when everything
is written; a kill between two of the renames is carried on as well.

The memory held does not grow with the corpus. No torch import.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from megatron.core.datasets.corpus.index_file import write_index
from megatron.core.datasets.corpus.token_file import explain_full_disk, sync_directory
from megatron.core.datasets.preprocessing.encoder import Sequences
from megatron.core.foundation.errors import DataError

_SUFFIX = ".unfinished"


class FileArray:
    """A file of numbers, read by slices: an index is written from it without holding it."""

    def __init__(self, path: str, dtype: type[np.number]) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._length = os.path.getsize(path) // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return a contiguous slice."""
        start, stop, step = part.indices(self._length)
        assert step == 1, step
        found: np.ndarray = np.fromfile(
            self.path, self.dtype, max(stop - start, 0), offset=start * self.dtype.itemsize
        )
        return found


class UnfinishedCorpus:
    """A `.bin`/`.idx` pair that grows in files of its own until it is complete.

    Args:
        prefix: path without `.bin` and `.idx`.
        dtype: of the tokens.
        sizes: of the three files, from `sizes` at an earlier time; None begins anew.
    Raises:
        DataError: the files are shorter than `sizes`, or cannot be written.
    """

    def __init__(self, prefix: str, dtype: type[np.number], sizes: list[int] | None = None) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self._paths = [f"{prefix}{name}{_SUFFIX}" for name in (".bin", ".lengths", ".documents")]
        self._files = [_open_to_append(path) for path in self._paths]
        if sizes is not None:
            try:
                for path, file, size in zip(self._paths, self._files, sizes, strict=True):
                    _cut_back(path, file, size)
            except DataError:
                self.close()
                raise
        else:
            for file in self._files:
                file.truncate(0)
            self._files[2].write(np.zeros(1, np.int64).tobytes())  # an index begins with 0
        self._num_sequences = 0 if sizes is None else sizes[1] // 4

    def add(self, part: Sequences) -> None:
        """Append documents."""
        ends = self._num_sequences + np.cumsum(part.per_document, dtype=np.int64)
        self._num_sequences += len(part.lengths)
        with explain_full_disk(self._paths[0], self._files[0].tell()):
            self._files[0].write(np.ascontiguousarray(part.tokens, self.dtype).data)
            self._files[1].write(np.ascontiguousarray(part.lengths, np.int32).data)
            self._files[2].write(ends.data)

    def flush_to_disk(self) -> list[int]:
        """Force everything onto the device; return the sizes of the files."""
        with explain_full_disk(self._paths[0], self._files[0].tell()):
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
        return [file.tell() for file in self._files]

    def close(self) -> None:
        """Close the files and leave them as they are."""
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk was reported already
                file.close()

    def discard(self) -> None:
        """Remove the files."""
        self.close()
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def finish_corpus(prefix: str, dtype: type[np.number]) -> None:
    """Write the index of a complete corpus and give both files their final names.

    May be called again after a kill within it. The old index goes before the new tokens come, so
    no reader ever sees one beside the other.
    """
    tokens, lengths, documents = (
        f"{prefix}{name}{_SUFFIX}" for name in (".bin", ".lengths", ".documents")
    )
    index = f"{prefix}.idx{_SUFFIX}"
    directory = os.path.dirname(os.path.abspath(prefix))
    if os.path.exists(tokens):
        with open(index, "wb", buffering=1 << 20) as file, explain_full_disk(index, 0):
            write_index(
                file,
                dtype=dtype,
                sequence_lengths=FileArray(lengths, np.int32),
                document_indices=FileArray(documents, np.int64),
            )
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{prefix}.idx")
        os.replace(tokens, f"{prefix}.bin")
    if os.path.exists(index):
        os.replace(index, f"{prefix}.idx")
    sync_directory(directory)
    for path in (lengths, documents):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _open_to_append(path: str) -> BinaryIO:
    try:
        with explain_full_disk(path, 0):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            file = open(path, "a+b", buffering=1 << 20)  # noqa: SIM115
            file.seek(0, os.SEEK_END)
            return file
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}.",
            rule="the output directory must be writable",
            flags=["--output-prefix"],
            fix="choose another place or change its permissions",
        ) from error


def _cut_back(path: str, file: BinaryIO, size: int) -> None:
    found = os.path.getsize(path)
    if found < size:
        raise DataError(
            f"{path}: {found:,} bytes, the journal of the run says {size:,}.",
            rule="the files of an unfinished run belong together",
            flags=["--output-prefix", "--restart"],
            fix="pass --restart to begin again",
        )
    file.truncate(size)
    file.seek(size)


class Journal:
    """The progress of a run: lines of JSON, each with a checksum, the last one counts.

    Only one process holds a journal at a time.

    Args:
        path: of the journal.
        restart: forget what is in it.
    Attributes:
        first: the line that the run began with: what it reads and how; None for a new run.
        last: the last complete line after it, or None.
    """

    def __init__(self, path: str, *, restart: bool = False) -> None:
        self.path = path
        self._file = _locked(path)
        # Read through the locked file: closing any other would release the lock.
        lines, size = ([], 0) if restart else _read_journal(self._file)
        if len(lines) < 2:  # killed before there was anything to continue with
            lines, size = [], 0
        self._file.truncate(size)
        self._file.seek(size)
        self.first: dict[str, Any] | None = lines[0] if lines else None
        self.last: dict[str, Any] | None = lines[-1] if lines else None

    def write(self, line: Mapping[str, object]) -> None:
        """Append a line and force it onto the device."""
        text = json.dumps(line)
        with explain_full_disk(self.path, self._file.tell()):
            self._file.write(f"{zlib.crc32(text.encode()):08x} {text}\n".encode())
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Release the journal and leave it for a later run."""
        self._file.close()

    def remove(self) -> None:
        """Remove the journal: the run is complete, or there is nothing to continue with."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._file.close()


def _locked(path: str) -> BinaryIO:
    """Open a journal and hold it: this process alone, not the workers it forks, until it dies."""
    while True:
        file = _open_to_append(path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
            file.close()  # the run that held it has just finished and removed it
        except OSError as error:
            file.close()
            raise DataError(
                f"another process is writing {path.removesuffix('.journal')}.",
                rule="an output has one writer",
                flags=["--output-prefix"],
                fix="wait for it, or choose another prefix",
            ) from error


def _read_journal(file: BinaryIO) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines (the first and the last at least) and where they end."""
    lines: list[dict[str, Any]] = []
    size = 0
    file.seek(0)
    for line in file:
        checksum, _, text = line.partition(b" ")
        if not line.endswith(b"\n") or b"%08x" % zlib.crc32(text[:-1]) != checksum:
            break
        lines = [*lines[:1], json.loads(text)]
        size += len(line)
    return lines, size
