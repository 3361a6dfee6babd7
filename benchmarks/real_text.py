"""Write text files of a machine as JSON lines, for benchmarks: documentation, sources, and more.

    python -m benchmarks.real_text OUT.jsonl /usr/share/doc/linux-doc-6.1 /usr/lib/python3.11 ...

Reads `.rst`, `.txt` and `.py` files below the folders (gzipped or not), one document each, ordered
by the digest of their names, so that the beginning of the output is a sample of all. Each entry of
a `.dict.dz` dictionary is a document. Files that are not UTF-8 are left out.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional

SUFFIXES = (".rst", ".txt", ".py")


def files_below(roots: Sequence[str]) -> list[Path]:
    """Return the text files below folders, and named files, in a fixed mixed order."""
    found = [
        path
        for root in map(Path, roots)
        for path in ([root] if root.is_file() else root.rglob("*"))
        if path.name.removesuffix(".gz").endswith((*SUFFIXES, ".dict.dz"))
        and "site-packages" not in path.parts
        and path.is_file()
    ]
    return sorted(found, key=lambda path: hashlib.blake2b(str(path).encode()).digest())


def documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file."""
    is_packed = path.suffix in (".gz", ".dz")
    data = gzip.decompress(path.read_bytes()) if is_packed else path.read_bytes()
    if path.suffix != ".dz":
        yield data.decode()
        return
    for entry in data.split(b"\n\n"):
        yield entry.decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Output, and input files."""

    target: Path = positional(metavar="FILE.jsonl")
    roots: tuple[str, ...] = positional(metavar="FOLDER")


def main() -> None:
    """Write the file and print its size."""
    flags = read_command_line(Flags, description=__doc__)
    count = size = left_out = 0
    with flags.target.open("w") as out:
        for path in files_below(flags.roots):
            try:
                for text in documents(path):
                    out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    count, size = count + 1, size + len(text.encode())
            except UnicodeDecodeError:
                left_out += 1
    print(f"{count:,} documents, {size:,} bytes of text; {left_out} files are not UTF-8")


if __name__ == "__main__":
    main()
