"""The files of a corpus: `PREFIX.idx`, and the tokens in `PREFIX.bin` or in the files of shards.

A corpus that was joined without copying has `PREFIX.bin.parts` in place of `PREFIX.bin`: JSON with
the shards' token files, relative to its own folder, and their sizes. The index describes the
concatenation, so copying the parts together gives the usual pair. No torch import.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron.core.datasets.corpus.token_file import MappedTokens, PositionedTokens, TokenReader
from megatron.core.foundation.errors import DataError, shown
from megatron.core.foundation.json_text import parse_json

MASK_SUFFIX = "_mask"
"""Suffix of the corpus that marks the learned tokens of conversations."""


def get_bin_path(path_prefix: str) -> str:
    """Return the name of the token file of a corpus."""
    return path_prefix + ".bin"


def get_idx_path(path_prefix: str) -> str:
    """Return the name of the index file of a corpus."""
    return path_prefix + ".idx"


def pair_exists(path_prefix: str) -> bool:
    """Return whether both files of a corpus are there."""
    return os.path.exists(get_idx_path(path_prefix)) and tokens_exist(get_bin_path(path_prefix))


def check_pair_exists(path_prefix: str) -> None:
    """Raise `DataError` with a similar existing name unless both files of a corpus exist."""
    bin_path, idx_path = get_bin_path(path_prefix), get_idx_path(path_prefix)
    missing = [] if tokens_exist(bin_path) else [bin_path]
    missing += [] if os.path.isfile(idx_path) else [idx_path]
    if not missing:
        return
    if path_prefix.endswith((".bin", ".idx")) and pair_exists(path_prefix[:-4]):
        fix = f"leave out the suffix: {path_prefix[:-4]}"
    else:
        fix = _similar_prefix(path_prefix) or "write the corpus with tools/preprocess_data.py"
    raise DataError(
        f"no such corpus: {' and '.join(missing)} not found.",
        rule="a data path is the common prefix of a .bin and an .idx file",
        flags=["--data-path"],
        fix=fix,
    )


def _similar_prefix(path_prefix: str) -> str:
    """Return a hint if the usual suffix of the preprocessing tool is missing."""
    directory, name = os.path.split(path_prefix)
    directory = directory or "."
    if not os.path.isdir(directory):
        return f"the directory {directory} does not exist"
    for entry in sorted(os.listdir(directory)):
        if entry.endswith(".idx") and entry.startswith(name):
            return f"did you mean {os.path.join(directory, entry[:-4])}?"
    return ""


def parts_path(bin_path: str) -> str:
    """Return the name of the list of parts that replaces a token file."""
    return bin_path + ".parts"


def tokens_exist(bin_path: str) -> bool:
    """Return whether a corpus has tokens, in one file or in parts."""
    return os.path.isfile(bin_path) or os.path.isfile(parts_path(bin_path))


def token_files(bin_path: str) -> list[str]:
    """Return the files that hold the tokens of a corpus, in order.

    Raises:
        DataError: the list of parts is damaged, or a part is missing or of another size.
    """
    if os.path.isfile(bin_path) or not os.path.isfile(parts_path(bin_path)):
        return [bin_path]
    path = parts_path(bin_path)
    folder = os.path.dirname(os.path.abspath(path))
    try:
        with open(path, encoding="utf-8") as file:
            listed = [
                (str(one["bin"]), int(one["bytes"])) for one in parse_json(file.read())["parts"]
            ]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(
            f"{path} is not a list of parts: {type(error).__name__} {error}.",
            rule="tools/merge_datasets.py --no-copy writes it",
            flags=["--data-path"],
            fix="join the shards again",
        ) from error
    files = []
    for name, size in listed:
        if os.path.isabs(name) or not name.endswith(".bin"):
            raise DataError(
                f"{path} names {shown(name)} as a part of the corpus.",
                rule="a part is the token file of another corpus, *.bin, relative to the list",
                flags=["--data-path"],
                fix="join the shards again if the corpus is yours; do not use it if it is from a "
                "stranger",
            )
        part = os.path.normpath(os.path.join(folder, name))
        found = os.path.getsize(part) if os.path.isfile(part) else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes"
            raise DataError(
                f"{part}, a part of {bin_path.removesuffix('.bin')}, {what}; it had {size:,} bytes "
                "when the parts were joined.",
                rule="a corpus that was joined without copying needs its parts",
                flags=["--data-path"],
                fix="restore the part, or join the shards again",
            )
        files.append(part)
    return files


def num_token_bytes(bin_path: str) -> int:
    """Return the bytes of all tokens of a corpus."""
    return sum(map(os.path.getsize, token_files(bin_path)))


def open_tokens(bin_path: str, *, mmap: bool) -> TokenReader:
    """Open the tokens of a corpus, in one file or in parts."""
    files = token_files(bin_path)
    opener = MappedTokens if mmap else PositionedTokens
    return opener(files[0]) if len(files) == 1 else ConcatenatedTokens(files, mmap=mmap)


def list_of_parts(bin_path: str, files: Sequence[str]) -> bytes:
    """Return the content of `parts_path(bin_path)` for token files in their order."""
    folder = os.path.dirname(os.path.abspath(bin_path))
    parts = [
        {"bin": os.path.relpath(file, folder), "bytes": os.path.getsize(file)} for file in files
    ]
    return json.dumps({"parts": parts}, indent=1).encode()


class ConcatenatedTokens:
    """Random access to several token files as if they were one."""

    buffer: None = None

    def __init__(self, paths: Sequence[str], *, mmap: bool) -> None:
        opener = MappedTokens if mmap else PositionedTokens
        self._parts: list[TokenReader] = [opener(path) for path in paths]
        sizes = [os.path.getsize(path) for path in paths]
        self._ends = np.cumsum(sizes, dtype=np.int64).tolist()
        self._begins = [end - size for end, size in zip(self._ends, sizes, strict=True)]

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Return `count` tokens from byte `offset`: a view of one part, or a copy over several."""
        width = np.dtype(dtype).itemsize
        pieces = []
        while count:
            at = bisect_right(self._ends, offset)
            if at == len(self._parts):
                raise IndexError(f"byte {offset} of {self._ends[-1] if self._ends else 0}")
            taken = min(count, (self._ends[at] - offset) // width)
            pieces.append(self._parts[at].read(dtype, taken, offset - self._begins[at]))
            count, offset = count - taken, offset + taken * width
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype)
