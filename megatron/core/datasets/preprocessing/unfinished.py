"""The files of an unfinished corpus, and renaming them to their final names.

No torch import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from megatron.core.datasets.corpus.index_file import write_index
from megatron.core.datasets.corpus.token_file import AtomicFile, cannot_write, explain_full_disk
from megatron.core.datasets.preprocessing.encoder import EncodedPart
from megatron.core.foundation.errors import DataError

_SUFFIX = ".unfinished"


class UnfinishedCorpus:
    """A `.bin`/`.idx` pair that is written to temporary files until it is complete.

    Args:
        prefix: path without `.bin` and `.idx`.
        dtype: type of the tokens.
        sizes: an earlier result of `flush_to_disk`, to continue from; None begins a new corpus.
    Raises:
        DataError: the files are shorter than `sizes`, or cannot be written.
    """

    def __init__(self, prefix: str, dtype: type[np.number], sizes: list[int] | None = None) -> None:
        self.dtype = dtype
        self._paths = _paths(prefix)
        self._files = [open_to_append(path) for path in self._paths]
        for path, file, size in zip(self._paths, self._files, sizes or (0, 0, 0), strict=True):
            found = os.path.getsize(path)
            if found < size:
                self.close()
                raise DataError(
                    f"{path}: {found:,} bytes, fewer than the {size:,} bytes in the run's note.",
                    rule="the files of an unfinished run belong together",
                    flags=["--output-prefix", "--restart"],
                    fix="pass --restart to begin again",
                )
            file.truncate(size)
            file.seek(size)
        if sizes is None:
            self._files[2].write(np.zeros(1, np.int64).tobytes())  # an index begins with 0
        self._num_sequences = 0 if sizes is None else sizes[1] // 4

    def add(self, part: EncodedPart) -> None:
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

    def close(self, *, discard: bool = False) -> None:
        """Close the files; leave them as they are, or remove them."""
        for file, path in zip(self._files, self._paths, strict=True):
            with suppress(OSError):  # a full disk was reported already
                file.close()
            if discard:
                with suppress(FileNotFoundError):
                    os.unlink(path)


def _paths(prefix: str) -> list[str]:
    """Return the files of tokens, of sequence lengths (int32) and of document ends (int64)."""
    return [f"{prefix}{name}{_SUFFIX}" for name in (".bin", ".lengths", ".documents")]


def finish_corpus(prefix: str, dtype: type[np.number]) -> None:
    """Write the index of a complete corpus and give both files their final names.

    After a kill it may be called again. The old index is removed before the new token file is
    renamed, so readers never find one with the other.
    """
    tokens, lengths, documents = _paths(prefix)
    if os.path.exists(tokens):
        with suppress(FileNotFoundError):
            os.unlink(f"{prefix}.idx")
        os.replace(tokens, f"{prefix}.bin")
    if os.path.exists(documents):
        write_whole(
            f"{prefix}.idx",
            lambda file: write_index(
                file,
                dtype=dtype,
                sequence_lengths=_numbers_in(lengths, np.int32),
                document_indices=_numbers_in(documents, np.int64),
            ),
        )
    for path in (documents, lengths):
        with suppress(FileNotFoundError):
            os.unlink(path)


def _numbers_in(path: str, dtype: type[np.number]) -> np.ndarray:
    """Return the numbers of a file, mapped, so that an index is written in little memory."""
    if not os.path.getsize(path):
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype, "r")


def write_whole(path: str, write: Callable[[AtomicFile], object]) -> None:
    """Write a file under a temporary name, force it onto the device, and rename it."""
    file = AtomicFile(path, partial=path + _SUFFIX)
    write(file)
    file.commit()


def open_to_append(path: str) -> BinaryIO:
    """Open a file for appending; make its folder.

    Raises:
        DataError: it cannot be written.
    """
    try:
        with explain_full_disk(path, 0):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            file = open(path, "a+b", buffering=1 << 20)  # noqa: SIM115
            file.seek(0, os.SEEK_END)
            return file
    except OSError as error:
        raise cannot_write(path, error) from error
