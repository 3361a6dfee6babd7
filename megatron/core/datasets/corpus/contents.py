"""Identify a corpus by its contents, and detect changes of its files while a run reads them.

No torch import.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence

from megatron.core.foundation.errors import DataError

_PAGE_BYTES = 4096
_NUM_PAGES = 64
"""64 pages cost 6 ms of a cold local disk. A file of up to 256 KiB is read as a whole."""
_INTERVAL_S = 0.5


def sampled_digest(
    read: Callable[[int, int], bytes], num_bytes: int, num_pages: int = _NUM_PAGES
) -> str:
    """Return a digest of the size and of pages at even distances, the first and last included.

    Args:
        read: returns `count` bytes from `offset`, given (count, offset).
        num_bytes: size of the file.
        num_pages: pages of 4 KiB that are read.
    """
    digest = hashlib.blake2b(str(num_bytes).encode(), digest_size=16)
    last = max(0, num_bytes - _PAGE_BYTES)
    for offset in sorted({last * page // max(1, num_pages - 1) for page in range(num_pages)}):
        digest.update(read(min(_PAGE_BYTES, num_bytes - offset), offset))
    return digest.hexdigest()


def sampled_digest_of_file(path: str) -> str:
    """Return `sampled_digest` of a local file."""
    with open(path, "rb") as file:
        return sampled_digest(
            lambda count, offset: os.pread(file.fileno(), count, offset), os.path.getsize(path)
        )


class ChangeWatch:
    """Check twice a second, while tokens are read, whether the files have changed.

    Replacing a file under its name is not a change: this process continues to read the opened file,
    and a resumed run compares the contents of the new file with its checkpoint.

    Args:
        paths: files of the corpus.
        digest: returns a digest of the contents. It is computed at the first check, and again only
            if the size or the time of a file has changed.
    """

    def __init__(self, paths: Sequence[str], digest: Callable[[], str]) -> None:
        self._paths, self._digest = paths, digest
        self._due = 0.0
        self._inodes: list[int] = []
        self._marks: list[tuple[int, int]] = []
        self._contents = ""

    def look(self) -> None:
        """Compare the files with their earlier state.

        Raises:
            DataError: a file was cut, or other contents were written into it.
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _INTERVAL_S
        try:
            stats = [os.stat(path) for path in self._paths]
        except FileNotFoundError:  # removed under its name: the opened file remains
            return
        inodes = [found.st_ino for found in stats]
        marks = [(found.st_size, found.st_mtime_ns) for found in stats]
        if not self._inodes:
            self._inodes, self._marks, self._contents = inodes, marks, self._digest()
        if inodes != self._inodes or marks == self._marks:
            return
        changed = [old != new for old, new in zip(self._marks, marks, strict=True)]
        cut = any(new[0] < old[0] for old, new in zip(self._marks, marks, strict=True))
        # A mapped page beyond the end of a cut file must not be touched.
        if cut or self._digest() != self._contents:
            raise DataError(
                f"{self._paths[changed.index(True)]} was written to while this run read it.",
                rule="a corpus must not change while it is in use",
                flags=["--data-path"],
                fix="restore the file, and resume from a checkpoint that is older than the change: "
                "samples since then may be wrong. Write a new corpus under another name",
            )
        self._marks = marks
