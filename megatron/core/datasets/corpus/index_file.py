"""The `.idx` file: its layout, how it is written, and the proof that it fits its `.bin`.

All numbers are little-endian; S sequences, D = documents + 1 entries in the document array:

    byte          content
    0             magic, 9 bytes
    9             uint64 version
    17            uint8 dtype code
    18            uint64 S
    26            uint64 D
    34            int32[S] length of each sequence in tokens
    34+4S         int64[S] byte offset of each sequence in the `.bin`
    34+12S        int64[D] document boundaries: 0, then the running number of sequences
    34+12S+8D     int8[S] mode of each sequence, multimodal sets only

The arrays are not aligned (34+12S need not be a multiple of 8); numpy reads unaligned arrays.
No torch import: the preprocessing tools import this module.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import Enum

import numpy as np

from megatron.core.datasets import native
from megatron.core.datasets.corpus.token_file import AtomicFile, mapped
from megatron.core.foundation.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CHECK_BLOCK = 1 << 18
"""Entries checked or written at a time: bounds the memory of a check at about 8 MiB."""


class DType(Enum):
    """The token types of the format and their codes."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: type[np.number] | np.dtype) -> int:
        """Return the code under which a numpy type is stored."""
        return cls[np.dtype(value).name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number]:
        """Return the numpy scalar type of a stored code."""
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: int | type[np.number]) -> int:
        """Return the bytes of one token, for a code or a numpy type."""
        dtype = DType.dtype_from_code(key) if isinstance(key, int) else key
        return np.dtype(dtype).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number]:
        """Return the type that preprocessing uses for a vocabulary of `cardinality` entries."""
        if cardinality is not None and cardinality < 65500:
            return np.uint16
        return np.int32


@dataclass(frozen=True, kw_only=True)
class IndexArrays:
    """The contents of an index file; all arrays are views of the mapped file."""

    dtype: type[np.number]
    sequence_lengths: np.ndarray
    """int32 [S], tokens."""
    sequence_pointers: np.ndarray
    """int64 [S], bytes."""
    document_indices: np.ndarray
    """int64 [D], sequences."""
    sequence_modes: np.ndarray | None
    """int8 [S] in a multimodal set."""


def disagreement(path: str, position: int, found: str, expected: str) -> DataError:
    """Return the error for bytes of `path` at `position` that break the format or the pair."""
    return DataError(
        f"{path}: byte {position}: found {found}, expected {expected}.",
        rule="a .bin/.idx pair must follow the indexed dataset format and belong together",
        flags=["--data-path"],
        fix="copy both files again from where they were made, or write them again with "
        "tools/preprocess_data.py; a file that is cut off or mixed up cannot be repaired",
    )


def read_index(path: str, *, multimodal: bool = False) -> IndexArrays:
    """Map an index file and check its header and its size.

    Args:
        path: the `.idx` file.
        multimodal: also read the sequence modes at its end.
    Raises:
        DataError: missing, not an index, another version, an unknown dtype, or cut off.
    """
    size = os.path.getsize(path)
    if size < HEADER.size:
        raise disagreement(
            path, size, "the end of the file", f"a header of {HEADER.size} bytes (truncated file)"
        )
    buffer = mapped(path)
    magic, version, code, num_sequences, num_entries = HEADER.unpack(
        buffer[: HEADER.size].tobytes()
    )
    if magic != MAGIC:
        raise disagreement(path, 0, f"{magic!r}", f"the magic {MAGIC!r} of an .idx file")
    if version != VERSION:
        raise disagreement(path, 9, f"version {version}", f"version {VERSION}")
    if code not in {entry.value for entry in DType}:
        raise disagreement(path, 17, f"dtype code {code}", "a code from 1 to 8")
    if num_entries < 1:
        raise disagreement(path, 26, "an empty document array", "at least the leading 0")
    plain_size = HEADER.size + 12 * num_sequences + 8 * num_entries
    full_size = plain_size + num_sequences
    contents = f"{num_sequences} sequences and {num_entries - 1} documents"
    if size not in ({full_size} if multimodal else {plain_size, full_size}):
        wanted = full_size if multimodal else plain_size
        what = "truncated file" if size < wanted else "bytes left over"
        raise disagreement(
            path, min(size, wanted), f"a file of {size} bytes", f"{wanted} for {contents} ({what})"
        )

    def view(dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        return np.frombuffer(buffer, dtype=dtype, count=count, offset=offset)

    return IndexArrays(
        dtype=DType.dtype_from_code(code),
        sequence_lengths=view(np.int32, num_sequences, HEADER.size),
        sequence_pointers=view(np.int64, num_sequences, HEADER.size + 4 * num_sequences),
        document_indices=view(np.int64, num_entries, HEADER.size + 12 * num_sequences),
        sequence_modes=view(np.int8, num_sequences, plain_size) if multimodal else None,
    )


def check_index(arrays: IndexArrays, idx_path: str, bin_path: str, num_bytes: int) -> None:
    """Check that lengths, offsets, documents and the size of the token file agree.

    It takes one pass over the index (a second for some hundred million sequences) and does not read
    the tokens.

    Args:
        num_bytes: size of the token file.
    Raises:
        DataError: names the file, the byte, the value found there and the value expected.
    """
    num_sequences = len(arrays.sequence_lengths)
    token_bytes = np.dtype(arrays.dtype).itemsize
    end = -1
    if native.compiled is not None:
        end = native.compiled.index_end(
            arrays.sequence_lengths,
            arrays.sequence_pointers,
            arrays.document_indices,
            token_bytes,
        )
    if end < 0:  # not compiled, or damaged: find the position
        end = _check_sequences(arrays, idx_path)
        _check_documents(arrays.document_indices, num_sequences, idx_path)
    if num_bytes != end:
        what = "truncated file" if num_bytes < end else "bytes left over"
        raise disagreement(
            bin_path,
            min(num_bytes, end),
            f"a file of {num_bytes} bytes",
            f"{end} bytes, the sum of the lengths in {idx_path} ({what})",
        )


def _check_sequences(arrays: IndexArrays, idx_path: str) -> int:
    """Check that each sequence begins at the end of its predecessor; return the last end."""
    num_sequences = len(arrays.sequence_lengths)
    token_bytes = np.dtype(arrays.dtype).itemsize
    pointers_at = HEADER.size + 4 * num_sequences
    end = 0
    for start in range(0, num_sequences, CHECK_BLOCK):
        lengths = arrays.sequence_lengths[start : start + CHECK_BLOCK].astype(np.int64)
        negative = np.flatnonzero(lengths < 0)
        if len(negative):
            at = start + int(negative[0])
            raise disagreement(
                idx_path,
                HEADER.size + 4 * at,
                f"length {lengths[negative[0]]} for sequence {at}",
                "0 or more tokens",
            )
        ends = end + np.cumsum(lengths) * token_bytes
        expected = ends - lengths * token_bytes
        pointers = arrays.sequence_pointers[start : start + CHECK_BLOCK]
        wrong = np.flatnonzero(pointers != expected)
        if len(wrong):
            at = start + int(wrong[0])
            raise disagreement(
                idx_path,
                pointers_at + 8 * at,
                f"offset {pointers[wrong[0]]} for sequence {at}",
                f"{expected[wrong[0]]}, the end of the sequences before it",
            )
        end = int(ends[-1])
    return end


def _check_documents(documents: np.ndarray, num_sequences: int, idx_path: str) -> None:
    """Check that the document boundaries rise from 0 to the number of sequences."""
    documents_at = HEADER.size + 12 * num_sequences
    if documents[0] != 0:
        raise disagreement(idx_path, documents_at, f"first document at {documents[0]}", "0")
    for start in range(0, len(documents) - 1, CHECK_BLOCK):
        block = documents[start : start + CHECK_BLOCK + 1]
        falling = np.flatnonzero(block[1:] < block[:-1])
        if len(falling):
            at = start + int(falling[0]) + 1
            raise disagreement(
                idx_path,
                documents_at + 8 * at,
                f"document boundary {documents[at]}",
                f"{documents[at - 1]} or more, as the boundary before it",
            )
    if documents[-1] != num_sequences:
        raise disagreement(
            idx_path,
            documents_at + 8 * (len(documents) - 1),
            f"last document boundary {documents[-1]}",
            f"{num_sequences}, the number of sequences",
        )


def write_index(
    file: AtomicFile,
    *,
    dtype: type[np.number],
    sequence_lengths: np.ndarray,
    document_indices: np.ndarray,
    sequence_modes: np.ndarray | None = None,
) -> None:
    """Write an index file in order, a block at a time.

    Args:
        file: takes the bytes, from the first on.
        dtype: of the tokens.
        sequence_lengths: int32 [S], tokens; the byte offsets are their running sum.
        document_indices: int64 [D], beginning with 0.
        sequence_modes: int8 [S] for a multimodal set.
    """
    num_sequences = len(sequence_lengths)
    code = DType.code_from_dtype(dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, num_sequences, len(document_indices)))
    _write_blocks(file, sequence_lengths, "<i4")
    token_bytes = np.dtype(dtype).itemsize
    end = 0
    for start in range(0, num_sequences, CHECK_BLOCK):
        taken = sequence_lengths[start : start + CHECK_BLOCK].astype(np.int64) * token_bytes
        ends = end + np.cumsum(taken)
        file.write((ends - taken).astype("<i8").data)
        end = int(ends[-1])
    _write_blocks(file, document_indices, "<i8")
    if sequence_modes is not None:
        file.write(np.ascontiguousarray(sequence_modes, dtype=np.int8).data)


def _write_blocks(file: AtomicFile, numbers: np.ndarray, dtype: str) -> None:
    for start in range(0, len(numbers), CHECK_BLOCK):
        block = numbers[start : start + CHECK_BLOCK]
        file.write(np.ascontiguousarray(block, dtype=dtype).data)
