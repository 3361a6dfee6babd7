"""A CUDA library keeps one architecture's machine code; an NCCL that fails is taken back."""

import lzma
import struct
import subprocess

import pytest

from tools import slim_cuda_library as tool
from tools.slim_cuda_library import codes, put, put_back, slim

ELF, PTX = 2, 1


def fat_binary(*entries):
    """Return a fat binary of (kind, architecture, code)."""
    body = b""
    for kind, architecture, code in entries:
        head = bytearray(64)
        struct.pack_into("<HHIQ", head, 0, kind, 0x0101, 64, len(code))
        struct.pack_into("<I", head, 28, architecture)
        body += bytes(head) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library():
    first = fat_binary((ELF, 80, b"a" * 96), (ELF, 90, b"b" * 128), (PTX, 90, b"c" * 64))
    second = fat_binary((ELF, 100, b"d" * 32), (ELF, 90, b"e" * 32))
    return bytearray(b"\x7fELF before" + first + b"between" + second + b"after")


def test_the_code_of_other_architectures_is_blank_and_nothing_else_is_changed():
    before, after = library(), library()
    sizes = slim(after, 90)
    assert sizes == {("ELF", 80): 96, ("ELF", 90): 160, ("PTX", 90): 64, ("ELF", 100): 32}
    wanted = bytes(before)
    for letter in b"acd":
        run = bytes([letter]) * {97: 96, 99: 64, 100: 32}[letter]
        assert wanted.count(run) == 1
        wanted = wanted.replace(run, bytes(len(run)))
    assert bytes(after) == wanted


def test_what_is_no_fat_binary_is_left_alone():
    magic = struct.pack("<I", 0xBA55ED50)
    broken = [magic, magic + b"\xff" * 100, magic + bytes(12), bytes(library()[:60])]
    for data in broken:
        assert list(codes(data)) == []


def test_an_architecture_without_code_is_an_error():
    with pytest.raises(ValueError, match="no machine code for sm_75"):
        slim(library(), 75)


def test_the_command_writes_what_can_be_unpacked(tmp_path):
    source, packed = tmp_path / "lib.so", tmp_path / "lib.xz"
    source.write_bytes(library())
    assert tool.main([str(source), "--into", str(packed)]) == 0
    wanted = library()
    slim(wanted, 90)
    assert lzma.decompress(packed.read_bytes()) == bytes(wanted)


@pytest.fixture
def files(tmp_path):
    library, packed = tmp_path / "libnccl.so.2", tmp_path / "nccl.xz"
    library.write_bytes(b"own")
    packed.write_bytes(lzma.compress(b"carried"))
    return library, packed


def import_of_torch(monkeypatch, prints):
    done = subprocess.CompletedProcess([], 0, stdout=prints, stderr="ImportError: planted")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


def test_a_library_that_torch_loads_stays_until_it_is_put_back(files, monkeypatch):
    library, packed = files
    import_of_torch(monkeypatch, "2.30.3\n")
    for _ in range(2):  # a stage that was killed has not put it back
        assert put(packed, library) == "torch uses NCCL 2.30.3"
        assert library.read_bytes() == b"carried"
    assert put_back(library) == "torch uses its own again"
    assert library.read_bytes() == b"own"
    assert put_back(library) == "torch uses its own"
    assert library.read_bytes() == b"own"


@pytest.mark.parametrize("content", [lzma.compress(b"carried"), b"no xz", None])
def test_a_library_that_fails_is_taken_back(content, files, monkeypatch):
    library, packed = files
    import_of_torch(monkeypatch, "")
    packed.unlink()
    if content is not None:
        packed.write_bytes(content)
    assert put(packed, library).startswith("not in place: ")
    assert library.read_bytes() == b"own"
