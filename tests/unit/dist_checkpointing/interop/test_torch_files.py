"""Files of torch.save: every tensor is read as torch reads it, and damage is refused."""

import io
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop import stored_view
from megatron.core.dist_checkpointing.interop.contents import ContentsBuilder
from megatron.core.dist_checkpointing.interop.stored_view import StoredBytes, StoredView, ViewReader
from megatron.core.dist_checkpointing.interop.torch_file import read_torch_file
from tests.unit.dist_checkpointing.interop.payloads import Runs, calls

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip

WITHOUT_STORAGE_CLASS = (torch.uint16, torch.float8_e4m3fn)


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind of strides and dtype."""
    base = torch.arange(120.0).view(2, 3, 4, 5)
    found = {str(d): torch.arange(7).to(d) for d in DTYPES}
    return found | {
        "whole": base, "transposed": base.transpose(1, 3), "part": base[1:, ::2, 1:3],
        "expanded": torch.ones(3, 1).expand(3, 4), "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3), "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a saved dict."""
    with ViewReader() as reader:
        return {k: reader.read_full(v) for k, v in read_torch_file(path).items()}


@pytest.mark.parametrize("is_zip", [True, False], ids=["archive", "legacy"])
def test_tensors_are_those_that_torch_reads(is_zip: bool, ram_path: Path) -> None:
    path = ram_path / "file.pt"
    saved = tensors()
    if not is_zip:  # torch does not read these from the older form
        saved = {k: v for k, v in saved.items() if v.dtype not in WITHOUT_STORAGE_CLASS}
    torch.save(saved, path, _use_new_zipfile_serialization=is_zip)
    found = read_all(path)
    for key, expected in saved.items():
        assert found[key].dtype == expected.dtype, key
        assert found[key].shape == expected.shape, key
        same = found[key].float() == expected.detach().float() if not expected.is_complex() else (
            found[key] == expected)  # fmt: skip
        assert bool(same.all()), key


def test_any_box_is_read_in_pieces_of_bounded_size(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_view, "SLAB_BYTES", 64)
    path = ram_path / "file.pt"
    base = torch.arange(2000.0).view(10, 20, 10)
    torch.save(base.transpose(0, 2), path)
    view = read_torch_file(path)
    with ViewReader() as reader:
        part = reader.read_full(view.narrow(((1, 2, 3), (7, 11, 5))))
    assert torch.equal(part, base.transpose(0, 2)[1:8, 2:13, 3:8])


def test_the_other_byte_order_is_turned_round(ram_path: Path) -> None:
    expected = {k: v for k, v in tensors().items() if v.dtype not in WITHOUT_STORAGE_CLASS}
    for key, value in expected.items():
        saved = io.BytesIO()
        torch.save(value.detach().contiguous().clone(), saved)
        path = ram_path / "big.pt"
        with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
            for member in old.infolist():
                data = old.read(member)
                if member.filename.endswith("byteorder"):
                    data = b"big"
                elif "/data/" in member.filename:
                    width = value.element_size() // (2 if value.is_complex() else 1)
                    rows = [data[i : i + width][::-1] for i in range(0, len(data), width)]
                    data = b"".join(rows)
                new.writestr(member.filename, data)
        with ViewReader() as reader:
            found = reader.read_full(read_torch_file(path))
        assert torch.equal(found.view(torch.uint8) if found.dim() else found,
                           value.detach().contiguous().view(torch.uint8) if found.dim() else value
                           ), key  # fmt: skip


@pytest.mark.parametrize("is_zip", [True, False], ids=["archive", "legacy"])
def test_code_in_a_file_never_runs(is_zip: bool, ram_path: Path) -> None:
    canary, path = ram_path / "canary", ram_path / "file.pt"
    value = {"w": torch.ones(2), "x": Runs(os.system, f"touch {canary}")}
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(DamagedCheckpointError, match=r"CKPT_UNSAFE.*posix\.system"):
        read_torch_file(path)
    for payload in calls(canary).values():
        path.write_bytes(payload)
        with pytest.raises(DamagedCheckpointError):
            read_torch_file(path)
    assert not canary.exists()


def repacked(path: Path, change) -> None:
    """Write an archive again with its members changed: change(name, data) -> (name, data, how)."""
    with zipfile.ZipFile(path) as old:
        members = [(m.filename, old.read(m)) for m in old.infolist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, data in members:
            for changed in change(name, data):
                new.writestr(*changed)


HOSTILE_ARCHIVES = {
    "no pickle": lambda n, d: [] if n.endswith("data.pkl") else [(n, d)],
    "two pickles": lambda n, d: [(n, d), ("b/data.pkl", d)] if n.endswith("pkl") else [(n, d)],
    "compressed": lambda n, d: [(n, d, zipfile.ZIP_DEFLATED)],
    "missing storage": lambda n, d: [] if n.endswith("data/0") else [(n, d)],
    "storage elsewhere": lambda n, d: [("../" + n, d)] if n.endswith("data/0") else [(n, d)],
    "short storage": lambda n, d: [(n, d[:-4])] if n.endswith("data/0") else [(n, d)],
    "long storage": lambda n, d: [(n, d + bytes(4))] if n.endswith("data/0") else [(n, d)],
    "unknown byte order": lambda n, d: [(n, b"middle")] if n.endswith("byteorder") else [(n, d)],
    "path in a key": lambda n, d: [(n, d.replace(b"X\x01\x00\x00\x000q", b"X\x01\x00\x00\x00/q"))],
    "tensor behind its storage": lambda n, d: [(n, d.replace(b"K\x08\x85", b"K\x09\x85"))],
}


@pytest.mark.parametrize("kind", HOSTILE_ARCHIVES)
def test_a_hostile_archive_is_refused(kind: str, ram_path: Path) -> None:
    path = ram_path / "file.pt"
    torch.save(torch.ones(8), path)
    before = path.read_bytes()
    repacked(path, HOSTILE_ARCHIVES[kind])
    assert path.read_bytes() != before
    with pytest.raises(DamagedCheckpointError, match="file.pt"):
        read_torch_file(path)


@pytest.mark.parametrize("is_zip", [True, False], ids=["archive", "legacy"])
def test_a_view_of_stride_0_does_not_claim_more_than_its_file(is_zip: bool, ram_path: Path) -> None:
    path = ram_path / "file.pt"
    huge = torch.ones(1).expand(1 << 20, 1 << 13)
    torch.save({"w": huge}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(DamagedCheckpointError, match=r"share memory is not on the allowlist"):
        read_torch_file(path)


def test_members_of_an_archive_do_not_share_bytes(ram_path: Path) -> None:
    path = ram_path / "file.pt"
    torch.save({"a": torch.ones(64), "b": torch.ones(64)}, path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        sizes = {m.filename: m for m in archive.infolist()}
        outer, inner = sizes["file/data/0"], sizes["file/data/1"]
    # The first storage is said to reach over the header of the second and into it.
    length = inner.header_offset - outer.header_offset + 64
    for place in (outer.header_offset + 18, outer.header_offset + 22):
        data[place : place + 4] = length.to_bytes(4, "little")
    entry = data.index(b"PK\x01\x02", inner.header_offset)
    while data[entry + 46 : entry + 57] != b"file/data/0":
        entry = data.index(b"PK\x01\x02", entry + 1)
    for place in (entry + 20, entry + 24):
        data[place : place + 4] = length.to_bytes(4, "little")
    data = data.replace(b"cpuq\x04K@t", b"cpuq\x04K" + bytes([length // 4]) + b"t", 1)
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="in another member"):
        read_torch_file(path)


def test_many_views_of_one_storage_do_not_make_a_huge_checkpoint(ram_path: Path) -> None:
    draft = ContentsBuilder(ram_path, "test")
    storage = StoredBytes(ram_path / "file.pt", 0, 1 << 20)
    for i in range(200):
        draft.add_whole(f"w{i}", StoredView(storage, torch.uint8, (1 << 20,), (1,)))
    with pytest.raises(DamagedCheckpointError, match="CKPT_UNSAFE.*tensors of 209715200 bytes"):
        draft.finish({}, {})


def test_every_cut_and_every_flip_of_an_archive_is_refused_or_harmless(ram_path: Path) -> None:
    path = ram_path / "file.pt"
    expected = torch.arange(16.0)
    torch.save({"w": expected}, path)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedCheckpointError):
            read_all(path)
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        try:
            found = read_all(path)
        except DamagedCheckpointError:
            continue
        assert list(found) == ["w"], place
        assert torch.equal(found["w"], expected), place


def test_links_and_special_files_are_not_opened(ram_path: Path) -> None:
    torch.save(torch.ones(2), ram_path / "secret.pt")
    link = ram_path / "link.pt"
    link.symlink_to(ram_path / "secret.pt")
    pipe = ram_path / "pipe.pt"
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(DamagedCheckpointError, match="CKPT_UNSAFE"):
            read_torch_file(path)


def test_a_legacy_file_with_a_wrong_count_is_refused(ram_path: Path) -> None:
    path = ram_path / "file.pt"
    torch.save(torch.arange(5.0), path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert data.count(struct.pack("<q", 5)) == 1
    path.write_bytes(data.replace(struct.pack("<q", 5), struct.pack("<q", 1 << 50)))
    with pytest.raises(DamagedCheckpointError, match=r"file\.pt"):
        read_torch_file(path)


def test_a_view_knows_its_bounds() -> None:
    storage = stored_view.StoredBytes(Path("x"), 0, 16)
    inside = StoredView(storage, torch.float32, (2, 2), (2, 1))
    assert inside.problem() is None
    assert StoredView(storage, torch.float32, (2, 2), (2, 1), 1).problem() is not None
    assert StoredView(storage, torch.float32, (2,), (-1,)).problem() is not None
    assert StoredView(storage, torch.float32, (1 << 61, 1 << 61), (0, 1)).problem() is not None
