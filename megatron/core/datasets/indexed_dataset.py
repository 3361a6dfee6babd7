"""A corpus of token sequences on disk: the `.bin`/`.idx` pair, read and written.

The format is Megatron-LM's, byte for byte (`corpus.index_file` has the table), so either program
reads the other's corpora. A pair is checked when it is opened, so that a damaged file stops a run
at its start. No torch import: the preprocessing tools and the loader workers import this module.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.datasets.corpus.contents import ChangeWatch, sampled_digest
from megatron.core.datasets.corpus.files import (
    check_pair_exists,
    get_bin_path,
    get_idx_path,
    num_token_bytes,
    open_tokens,
    pair_exists,
    token_files,
)
from megatron.core.datasets.corpus.index_file import (
    DType,
    check_index,
    read_index,
    write_index,
)
from megatron.core.datasets.corpus.object_store import StoredObject, StoredTokens, is_url
from megatron.core.datasets.corpus.token_file import (
    AtomicFile,
    TokenReader,
    explain_full_disk,
    sync_directory,
)
from megatron.core.foundation.errors import DataError

__all__ = ["DType", "IndexedDataset", "IndexedDatasetBuilder", "get_bin_path", "get_idx_path"]


class IndexedDataset:
    """Random access to the sequences of a corpus.

    Picklable: a loader worker that is spawned maps the files again instead of copying them.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.
        multimodal: whether the index holds a mode for each sequence, returned with its tokens.
        mmap: map the token file; False reads it with positioned reads.
        object_storage_cache: folder of local copies, if the prefix is a URL.
        check: check in one pass over the index that both files belong together.
    Raises:
        DataError: a file is missing or the pair is damaged.
    """

    dtype: type[np.number]
    """The numpy type of the tokens."""
    sequence_lengths: np.ndarray
    """int32 [S], tokens in each sequence."""
    sequence_pointers: np.ndarray
    """int64 [S], byte offset of each sequence in the token file."""
    document_indices: np.ndarray
    """int64 [documents + 1], number of sequences before each document, and in all."""
    sequence_modes: np.ndarray | None
    """int8 [S] in a multimodal set, else None."""

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        *,
        check: bool = True,
        object_storage_cache: str | None = None,
    ) -> None:
        self.path_prefix = path_prefix
        self.object_storage_cache = object_storage_cache
        self.multimodal = multimodal
        self.mmap = mmap
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        stored = None
        if is_url(path_prefix):
            stored = StoredObject(bin_path, object_storage_cache)
            idx_path = StoredObject(idx_path, object_storage_cache).full()
        else:
            check_pair_exists(path_prefix)
        index = read_index(idx_path, multimodal=multimodal)
        self.dtype = index.dtype
        self.sequence_lengths = index.sequence_lengths
        self.sequence_pointers = index.sequence_pointers
        self.document_indices = index.document_indices
        self.sequence_modes = index.sequence_modes
        self._num_bytes = num_token_bytes(bin_path) if stored is None else stored.num_bytes
        self._token_bytes = np.dtype(self.dtype).itemsize
        if check:
            check_index(index, idx_path, bin_path, self._num_bytes)
        self._tokens: TokenReader = (
            open_tokens(bin_path, mmap=mmap) if stored is None else StoredTokens(stored)
        )
        self._watch = (
            ChangeWatch([*token_files(bin_path), idx_path], self._state) if stored is None else None
        )

    def __getstate__(self) -> tuple[str, bool, bool, str | None]:
        return self.path_prefix, self.multimodal, self.mmap, self.object_storage_cache

    def __setstate__(self, state: tuple[str, bool, bool, str | None]) -> None:
        *pair, cache = state
        # Checked once already, by the process that opened it first.
        self.__init__(*pair, check=False, object_storage_cache=cache)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int | np.integer | slice) -> Any:
        """Return the tokens of one sequence, or a list of them for a contiguous slice.

        A multimodal set returns (tokens, mode), or (list of tokens, modes).
        """
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if step != 1:
                raise ValueError(f"slices of a corpus must be contiguous, not of step {step}")
            sequences = [self._read(i, 0, None) for i in range(start, stop)]
            modes = self.sequence_modes
            return sequences if modes is None else (sequences, modes[start:stop])
        return self.get(idx)

    def get(self, idx: int | np.integer, offset: int = 0, length: int | None = None) -> Any:
        """Return part of one sequence.

        Args:
            idx: sequence number.
            offset: first token.
            length: number of tokens; None reads to the end of the sequence.
        Returns:
            array [length] of the corpus' type, possibly read-only; (array, mode) if multimodal.
        """
        tokens = self._read(idx, offset, length)
        modes = self.sequence_modes
        return tokens if modes is None else (tokens, modes[idx])

    def _read(self, idx: int | np.integer, offset: int, length: int | None) -> np.ndarray:
        self.check_unchanged()
        available = int(self.sequence_lengths[idx])
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {idx} of {self.path_prefix}, "
                f"which holds {available}"
            )
        start = int(self.sequence_pointers[idx]) + offset * self._token_bytes
        return self._tokens.read(self.dtype, int(length), start)

    def num_tokens(self, sequences: range) -> int:
        """Return the number of tokens of consecutive sequences."""
        if not sequences:
            return 0
        begin, last = self.sequence_pointers[sequences.start], sequences.stop - 1
        before_last = int(self.sequence_pointers[last] - begin) // self._token_bytes
        return before_last + int(self.sequence_lengths[last])

    def read_tokens(self, first: int, count: int) -> np.ndarray:
        """Return `count` tokens from number `first` of the token file, across sequences."""
        self.check_unchanged()
        return self._tokens.read(self.dtype, count, first * self._token_bytes)

    def check_unchanged(self) -> None:
        """Raise DataError if the files were written to since the first read (`ChangeWatch.look`).

        A reader of `buffer` must call this before it reads.
        """
        if self._watch is not None:
            self._watch.look()

    def document_lengths(self) -> np.ndarray:
        """Return the tokens of each document, int64."""
        ends = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        lengths: np.ndarray = np.diff(ends[self.document_indices])
        return lengths

    def document_tokens(self, document: int) -> np.ndarray:
        """Return the tokens of all sequences of a document.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= document < len(self.document_indices) - 1:
            raise IndexError(f"document {document} of {len(self.document_indices) - 1}")
        first, last = self.document_indices[document : document + 2].tolist()
        if first == last:
            return np.empty(0, self.dtype)
        begin = int(self.sequence_pointers[first]) // self._token_bytes
        return self.read_tokens(begin, self.num_tokens(range(first, last)))

    @property
    def buffer(self) -> np.ndarray | None:
        """uint8, the mapped token file; None if it is read otherwise."""
        return self._tokens.buffer

    def get_document_indices(self) -> np.ndarray:
        """Return `document_indices`."""
        return self.document_indices

    def shape_digest(self) -> str:
        """Return a digest of type, sizes and up to 8,192 sequence lengths spread over the index.

        Index arrays depend only on these, so it names their cache files. It costs microseconds.
        """
        stride = max(1, len(self) // 8192)
        sampled = np.ascontiguousarray(self.sequence_lengths[::stride])
        sizes = f"{np.dtype(self.dtype).name} {len(self)} {len(self.document_indices)} "
        sizes += str(self._num_bytes)
        return hashlib.blake2b(sizes.encode() + sampled.tobytes(), digest_size=16).hexdigest()

    def contents_digest(self) -> str:
        """Return a digest of 64 pages of tokens, or of 2 pages of an object in a store."""
        return sampled_digest(
            lambda count, offset: self._tokens.read(np.uint8, count, offset).tobytes(),
            self._num_bytes,
            **({"num_pages": 2} if self._watch is None else {}),
        )

    def _state(self) -> str:
        return self.shape_digest() + self.contents_digest()

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Return whether both files of a corpus are there."""
        return pair_exists(path_prefix)


def check_same_type(corpus: IndexedDataset, dtype: type[np.number]) -> None:
    """Refuse to join corpora of different token types.

    Raises:
        DataError: names both types.
    """
    if corpus.dtype != dtype:
        raise DataError(
            f"{get_idx_path(corpus.path_prefix)}: tokens of type {np.dtype(corpus.dtype).name} are"
            f" added to tokens of type {np.dtype(dtype).name}.",
            rule="a corpus has one type of token, which preprocessing chooses by the vocabulary",
            fix="preprocess both with one tokenizer, or train on both with --data-path without"
            " merging them",
        )


class IndexedDatasetBuilder:
    """Write a corpus, sequence by sequence.

    Both files are written under temporary names and appear together in `finalize`; before that,
    or after any error, nothing is under their final names. The memory held is 4 bytes for a
    sequence and 8 for a document. Usable as a context manager, which discards on an exception.

    Args:
        bin_path: final name of the token file.
        dtype: numpy type of the tokens, see `DType.optimal_dtype`.
        multimodal: whether each sequence has a mode.
    Raises:
        DataError: full disk, or a token that the type cannot hold.
    """

    def __init__(
        self, bin_path: str, dtype: type[np.number] = np.int32, multimodal: bool = False
    ) -> None:
        self.dtype = np.dtype(dtype).type
        self.multimodal = multimodal
        self._file = AtomicFile(bin_path)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b")

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._documents) - 1

    def add_item(self, tensor: object, mode: int = 0) -> None:
        """Append one sequence (anything that numpy can turn into a one-dimensional array)."""
        tokens = self._as_tokens(tensor)
        self._file.write(tokens.data)
        self._lengths.append(len(tokens))
        if self.multimodal:
            self._modes.append(mode)

    def end_document(self) -> None:
        """End the document of the sequences added since the last call."""
        self._documents.append(len(self._lengths))

    def add_document(
        self, tensor: object, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append one document of several sequences.

        Args:
            tensor: tokens of all its sequences, one after the other.
            lengths: tokens of each sequence.
            modes: mode of each sequence in a multimodal set, 0 by default.
        """
        self.add_documents(tensor, np.asarray(lengths, np.int64), np.array([len(lengths)]), modes)

    def add_documents(
        self,
        tensor: object,
        lengths: np.ndarray,
        sequences_per_document: np.ndarray,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Append many documents at once, without a Python step for each.

        Args:
            tensor: tokens of all their sequences, one after the other.
            lengths: [sequences], tokens of each.
            sequences_per_document: [documents], sequences of each.
            modes: [sequences] in a multimodal set, 0 by default.
        """
        tokens = self._as_tokens(tensor)
        total, sequences = int(np.sum(lengths)), int(np.sum(sequences_per_document))
        if total != len(tokens) or sequences != len(lengths):
            raise ValueError(
                f"{len(tokens)} tokens in {len(lengths)} sequences were given with lengths that "
                f"sum to {total} and documents that hold {sequences} sequences"
            )
        self._file.write(tokens.data)
        first = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(lengths, np.int32).tobytes())
        ends = first + np.cumsum(sequences_per_document, dtype=np.int64)
        self._documents.frombytes(ends.tobytes())
        if self.multimodal:
            self._modes.extend(modes if modes is not None else bytes(len(lengths)))

    def add_index(self, path_prefix: str) -> None:
        """Append a whole corpus of the same type (this is how corpora are merged)."""
        other = IndexedDataset(path_prefix, multimodal=self.multimodal)
        check_same_type(other, self.dtype)
        for path in token_files(get_bin_path(path_prefix)):
            with open(path, "rb") as source:
                shutil.copyfileobj(source, self._file, 16 << 20)
        first = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._documents.frombytes((other.document_indices[1:] + first).tobytes())
        if other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())

    def finalize(self, idx_path: str) -> None:
        """Write the index and give both files their final names.

        The old index is removed first and the new one appears last, so an interruption leaves
        either the old pair, or a token file without an index, which no reader accepts.
        """
        index = AtomicFile(idx_path)
        try:
            write_index(
                index,
                dtype=self.dtype,
                sequence_lengths=np.frombuffer(self._lengths, np.int32),
                document_indices=np.frombuffer(self._documents, np.int64),
                sequence_modes=np.frombuffer(self._modes, np.int8) if self.multimodal else None,
            )
            index.flush_to_disk()
            self._file.flush_to_disk()
        except BaseException:
            index.discard()
            self.discard()
            raise
        with explain_full_disk(idx_path, index.bytes_written):
            if os.path.exists(idx_path):
                os.unlink(idx_path)
            self._file.rename()
            index.rename()
            sync_directory(os.path.dirname(os.path.abspath(idx_path)))

    def discard(self) -> None:
        """Remove the partial files; do nothing after `finalize`."""
        self._file.discard()

    def _as_tokens(self, tensor: Any) -> np.ndarray:
        numpy_of = getattr(tensor, "numpy", None)
        given = np.asarray(numpy_of() if callable(numpy_of) else tensor)
        if given.ndim != 1:
            given = given.reshape(-1)
        if given.dtype == self.dtype:
            return np.ascontiguousarray(given)
        if given.size and np.issubdtype(self.dtype, np.integer):
            limits = np.iinfo(self.dtype)
            low, high = given.min(), given.max()
            if low < limits.min or high > limits.max:
                worst = low if low < limits.min else high
                raise DataError(
                    f"token id {worst} does not fit into {np.dtype(self.dtype).name}, the type "
                    f"of {self._file.path}.",
                    rule=f"ids must be between {limits.min} and {limits.max}",
                    flags=["--tokenizer-type", "--vocab-size"],
                    fix="build the corpus with dtype=DType.optimal_dtype(vocab_size)",
                )
        return np.ascontiguousarray(given, dtype=self.dtype)
