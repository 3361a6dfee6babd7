#!/usr/bin/env python3
"""Make a CUDA library small enough to carry, and replace torch's NCCL by a carried NCCL.

    python3 tools/slim_cuda_library.py libnccl.so.2 --into nccl.xz       # keeps sm_90
    python3 tools/slim_cuda_library.py --put nccl.xz                     # torch uses it
    python3 tools/slim_cuda_library.py --back                            # torch uses its own again

Nearly all of such a library is machine code, once per generation of GPUs. The code of all
generations but one is overwritten by zeros, which xz compresses well. The file keeps its length and
layout. The driver loads only the code for its own card, so it never reads the zeros.

Fat binary, as found in files: u32 0xBA55ED50, u16 version, u16 bytes of this header (16), u64 bytes
of all entries; then entries: u16 kind (1 PTX, 2 ELF), u16, u32 bytes of its header, u64 bytes of
its code, and at byte 28 the u32 architecture (90 for sm_90).
"""

from __future__ import annotations

import argparse
import importlib.util
import lzma
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER_BYTES = 16
_SMALLEST_ENTRY = 64
_ASK = """
import ctypes, sys, torch
number = ctypes.c_int()
assert ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)) == 0
print(f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}")
"""
KINDS = {1: "PTX", 2: "ELF"}


class Code(NamedTuple):
    """One architecture's code in a library: bytes `begin` to `end`."""

    kind: str
    architecture: int
    begin: int
    end: int


def codes(library: bytes | bytearray) -> Iterator[Code]:
    """Yield the code of all fat binaries; skip entries with another layout."""
    at = library.find(_MAGIC)
    while 0 <= at <= len(library) - _HEADER_BYTES:
        _, header, size = struct.unpack_from("<HHQ", library, at + 4)
        place, end = at + header, at + header + size
        while header == _HEADER_BYTES and place + _SMALLEST_ENTRY <= end <= len(library):
            kind, _, head, length = struct.unpack_from("<HHIQ", library, place)
            (architecture,) = struct.unpack_from("<I", library, place + 28)
            begin = place + head
            if kind not in KINDS or head < 32 or begin + length > end:
                break
            yield Code(KINDS[kind], architecture, begin, begin + length)
            place = begin + length
        at = library.find(_MAGIC, at + len(_MAGIC))


def slim(library: bytearray, architecture: int) -> Counter[tuple[str, int]]:
    """Blank all code but one architecture's machine code; return bytes by kind and architecture.

    Raises:
        ValueError: the library has no machine code for it.
    """
    found = list(codes(library))
    sizes: Counter[tuple[str, int]] = Counter()
    for code in found:
        sizes[code.kind, code.architecture] += code.end - code.begin
    if ("ELF", architecture) not in sizes:
        raise ValueError(f"no machine code for sm_{architecture}; there is {sorted(sizes)}")
    for code in found:
        if (code.kind, code.architecture) != ("ELF", architecture):
            library[code.begin : code.end] = bytes(code.end - code.begin)
    return sizes


def nccl_of_torch() -> Path | None:
    """Return the NCCL that torch loads, if it is a separate package."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        return None
    folders = (spec.submodule_search_locations or []) if spec else []
    paths = [Path(folder) / "lib" / "libnccl.so.2" for folder in folders]
    return next((path for path in paths if path.exists()), None)


def put(packed: Path, library: Path) -> str:
    """Replace a library by an unpacked one, keeping a copy; return a description of the result.

    torch does not import without a loadable NCCL: if the import fails, the old one is restored.
    """
    kept, partial = (library.with_name(library.name + end) for end in (".own", ".partial"))
    try:
        with lzma.open(packed) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if not kept.exists():
            shutil.copy2(library, kept)
        os.replace(partial, library)
        done = subprocess.run([sys.executable, "-c", _ASK, str(library)], capture_output=True,
                              text=True, timeout=45)  # fmt: skip
        if done.returncode == 0 and done.stdout.strip():
            return f"torch uses NCCL {done.stdout.strip()}"
        problem = (done.stderr.splitlines() or ["torch does not import"])[-1]
    except (OSError, EOFError, lzma.LZMAError, subprocess.SubprocessError) as error:
        problem = f"{type(error).__name__}: {error}"
    return f"not in place: {problem}; {put_back(library)}"


def put_back(library: Path) -> str:
    """Restore the kept library; return a description of the result."""
    kept = library.with_name(library.name + ".own")
    if not kept.exists():
        return "torch uses its own"
    os.replace(kept, library)
    return "torch uses its own again"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(
        prog="slim_cuda_library.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("library", type=Path, nargs="?", help="library to make small")
    parser.add_argument("--into", type=Path, help="file to write, .xz")
    parser.add_argument("--arch", type=int, default=90, help="architecture to keep: 90 for sm_90")
    parser.add_argument("--put", type=Path, metavar="XZ", help="put this in the place of NCCL")
    parser.add_argument("--back", action="store_true", help="put torch's own NCCL back")
    flags = parser.parse_args(argv)
    if flags.put or flags.back:
        library = nccl_of_torch()
        if library is None:
            print("torch has no NCCL of its own package here")
            return 1
        print(put(flags.put, library) if flags.put else put_back(library))
        return 0
    if not (flags.library and flags.into):
        parser.error("name a library and --into a file, or --put, or --back")
    data = bytearray(flags.library.read_bytes())
    try:
        sizes = slim(data, flags.arch)
    except ValueError as error:
        parser.error(f"{flags.library}: {error}")
    for (kind, architecture), size in sorted(sizes.items()):
        print(f"{kind} {architecture}: {size / 2**20:.1f} MiB", file=sys.stderr)
    with lzma.open(flags.into, "wb", preset=6) as out:
        out.write(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
