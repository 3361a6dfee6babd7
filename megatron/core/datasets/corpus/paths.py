"""The files of a corpus, and what to say when they are not there."""

from __future__ import annotations

import os

from megatron.core.datasets.corpus.multi_file_bin import tokens_exist
from megatron.core.foundation.errors import DataError

MASK_SUFFIX = "_mask"
"""Ends the name of the corpus that says which tokens of a conversation are learned."""


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
    """Raise `DataError` with the nearest that exists, unless both files of a corpus are there."""
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
    """Return a hint when the usual suffix of the preprocessing tool was forgotten."""
    directory, name = os.path.split(path_prefix)
    directory = directory or "."
    if not os.path.isdir(directory):
        return f"the directory {directory} does not exist"
    for entry in sorted(os.listdir(directory)):
        if entry.endswith(".idx") and entry.startswith(name):
            return f"did you mean {os.path.join(directory, entry[:-4])}?"
    return ""
