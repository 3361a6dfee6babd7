"""A checkpoint from a stranger: nothing runs, nothing outside is opened, nothing hangs."""

import ast
import io
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.manifest import metadata_bytes
from megatron.core.dist_checkpointing.shard_file import hash_of
from megatron.core.foundation.errors import CheckpointError
from tests.unit.dist_checkpointing.interop.payloads import Runs, calls
from tests.unit.dist_checkpointing.runs import load, save
from tests.unit.dist_checkpointing.states import one_tensor

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "name",
    ["__0_0.safetensors", "common.json", "manifest.json", "metadata.json",
     "../latest_checkpointed_iteration.txt", "../.lease"],
)  # fmt: skip
def test_code_in_any_file_never_runs(name: str, ram_path: Path) -> None:
    canary = ram_path / "canary"
    directory = ram_path / "run"
    save(directory, 10)
    path = directory / "iter_0000010" / name
    original = path.read_bytes()
    payloads = [*calls(canary).values()]
    for is_zip in (True, False):
        saved = io.BytesIO()
        torch.save(Runs(os.system, f"touch {canary}"), saved, _use_new_zipfile_serialization=is_zip)
        payloads.append(saved.getvalue())
    for payload in payloads:
        path.write_bytes(payload)
        if name.startswith(".."):
            assert load(directory) == 10
        else:
            with pytest.raises(CheckpointError, match="is intact"):
                load(directory)
    path.write_bytes(original)
    assert load(directory) == 10
    assert not canary.exists()


def rewritten(directory: Path, change: Callable[[dict, Path], Any]) -> None:
    """Change the manifest and correct every hash above it, as an attacker would."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    data = change(manifest, directory)
    data = json.dumps(manifest).encode() if data is None else data
    (directory / "manifest.json").write_bytes(data)
    (directory / "metadata.json").write_bytes(metadata_bytes(data))


def rename_file(new: str) -> Callable[[dict, Path], None]:
    def change(manifest: dict, directory: Path) -> None:
        manifest["files"][new] = manifest["files"].pop("__0_0.safetensors")
        for shard in manifest["tensors"]["w"]["shards"]:
            shard["file"] = new

    return change


def in_shard(**fields: Any) -> Callable[[dict, Path], None]:
    return lambda manifest, _: manifest["tensors"]["w"]["shards"][0].update(fields)


def in_tensor(**fields: Any) -> Callable[[dict, Path], None]:
    return lambda manifest, _: manifest["tensors"]["w"].update(fields)


def in_file(**fields: Any) -> Callable[[dict, Path], None]:
    return lambda manifest, _: manifest["files"]["__0_0.safetensors"].update(fields)


def in_top(**fields: Any) -> Callable[[dict, Path], None]:
    return lambda manifest, _: manifest.update(fields)


def two_shards(manifest: dict, _: Path) -> None:
    manifest["tensors"]["w"]["shards"] *= 2


def symlink(manifest: dict, directory: Path) -> None:
    (directory / "__0_0.safetensors").rename(directory.parent / "elsewhere")
    (directory / "__0_0.safetensors").symlink_to(directory.parent / "elsewhere")


def pipe(manifest: dict, directory: Path) -> None:
    (directory / "__0_0.safetensors").unlink()
    os.mkfifo(directory / "__0_0.safetensors")


def folder(manifest: dict, directory: Path) -> None:
    (directory / "__0_0.safetensors").unlink()
    (directory / "__0_0.safetensors").mkdir()


def device(manifest: dict, directory: Path) -> None:
    (directory / "__0_0.safetensors").unlink()
    (directory / "__0_0.safetensors").symlink_to("/dev/zero")


def common(form: Any) -> Callable[[dict, Path], None]:
    def change(manifest: dict, directory: Path) -> None:
        data = form if isinstance(form, bytes) else json.dumps(form).encode()
        (directory / "common.json").write_bytes(data)
        manifest["files"]["common.json"] = {"size": len(data), "hash": hash_of(data)}

    return change


def plain(value: Any) -> Callable[[dict, Path], None]:
    return common({"common": {"x": value}, "objects": {}})


HUGE = 1 << 62
ATTACKS: dict[str, Callable[[dict, Path], Any]] = {
    "parent path": rename_file("../outside"),
    "absolute path": rename_file("/etc/passwd"),
    "NUL in a name": rename_file("__0_0.safetensors\0.json"),
    "dot": rename_file("."),
    "newline after a name": rename_file("__0_0.safetensors\n"),
    "other digits": rename_file("__\u0660_\u0660.safetensors"),
    "nested name": rename_file("a/__0_0.safetensors"),
    "pickle suffix": rename_file("__0_0.distcp"),
    "a symbolic link": symlink,
    "a pipe": pipe,
    "a directory": folder,
    "a device": device,
    "huge file": in_file(size=HUGE),
    "negative size": in_file(size=-1),
    "size as text": in_file(size="304"),
    "size as float": in_file(size=304.0),
    "size as true": in_file(header_size=True),
    "huge header": in_file(header_size=HUGE),
    "extra field": in_file(mode="0777"),
    "hash of another length": in_file(hash="ab"),
    "huge shape": in_tensor(shape=[HUGE, HUGE]),
    "empty but huge shape": in_tensor(shape=[0, HUGE], shards=[]),
    "negative shape": in_tensor(shape=[-3, -4]),
    "no shards": in_tensor(shards=[]),
    "shape is an object": in_tensor(shape={"0": 3}),
    "unknown dtype": in_tensor(dtype="O"),
    "wider dtype": in_tensor(dtype="F64"),
    "many dimensions": in_tensor(shape=[1] * 1000),
    "overlapping shards": two_shards,
    "shard outside": in_shard(offset=[1, 0]),
    "shard behind the file": in_shard(begin=1 << 40),
    "shard in the header": in_shard(begin=0),
    "negative begin": in_shard(begin=-8),
    "no hashes": in_shard(hashes=[]),
    "too many hashes": in_shard(hashes=["0" * 64] * 100_000),
    "number as a hash": in_shard(hashes=[7]),
    "file of another kind": in_shard(file="common.json"),
    "unlisted file": in_shard(file="__9_0.safetensors"),
    "other version": in_top(version=2),
    "version as text": in_top(version="1"),
    "other hash function": in_top(hash="md5"),
    "no block size": in_top(block_bytes=0),
    "files as a list": in_top(files=[]),
    "unknown field": in_top(run_this="rm -rf /"),
    "deep nesting": lambda m, d: b"[" * 200_000 + b"]" * 200_000,
    "not JSON": lambda m, d: b"\x80\x04\x95",
    "not UTF-8": lambda m, d: b'{"format": "\xff"}',
    "huge number": lambda m, d: b'{"version": ' + b"9" * 5000 + b"}",
    "NaN": lambda m, d: b'{"version": NaN}',
    "repeated key": lambda m, d: json.dumps(m).encode()[:-1] + b',"version":1}',
    "a list": lambda m, d: b"[]",
    "null": lambda m, d: b"null",
    "empty": lambda m, d: b"",
    "common is a list": common([]),
    "common is deep": common(b"[" * 200_000 + b"]" * 200_000),
    "common deep in a tag": common(
        b'{"common":' + b'{"$tuple":[' * 900 + b"]}" * 900 + b',"objects":{}}'
    ),
    "common with an unknown tag": plain({"$object": "os.system"}),
    "common with a tag and more": plain({"$tuple": [], "$x": 1}),
    "namespace of wrong type": plain({"$namespace": 3}),
    "unhashable key": plain({"$dict": [[[], 1]]}),
    "object array": plain({"$array": ["object", [1], "AAAA"]}),
    "array too short": plain({"$array": ["int64", [HUGE], "AAAA"]}),
    "array negative": plain({"$array": ["int64", [-1], "AAAAAAAAAAA="]}),
    "tensor too short": plain({"$tensor": ["float32", [HUGE], ""]}),
    "tensor of no dtype": plain({"$tensor": ["load", [1], "AAAA"]}),
    "not base64": plain({"$bytes": "@@@@"}),
    "dtype that is a function": plain({"$dtype": "load"}),
}


def read_everything(directory: Path) -> None:
    """Read tensors and plain values as the tools do."""
    dist_checkpointing.load_plain_tensors(directory)
    dist_checkpointing.load_common_state_dict(directory)


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_metadata_with_corrected_hashes_is_refused_cleanly(
    name: str, ram_path: Path
) -> None:
    directory = ram_path / "iter_0000010"
    (ram_path / "outside").write_bytes(b"secret" * 100)
    dist_checkpointing.save({"w": one_tensor(), "x": 1}, directory)
    rewritten(directory, ATTACKS[name])
    opened: list[str] = []
    real_open = os.open

    def watched(path, *args, **kwargs):
        opened.append(os.path.realpath(path))
        return real_open(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watched)
        with pytest.raises(CheckpointError):
            dist_checkpointing.load({"w": one_tensor()}, directory)
        with pytest.raises(CheckpointError):
            read_everything(directory)
    inside = str(directory.resolve())
    # A refused link is resolved by this test only; the loader opens with O_NOFOLLOW.
    if name not in ("a symbolic link", "a device"):
        assert all(path.startswith(inside) for path in opened)


def test_a_linked_iteration_directory_is_refused_and_says_why(ram_path: Path) -> None:
    save(ram_path / "other", 10)
    (ram_path / "run").mkdir()
    (ram_path / "run" / "iter_0000010").symlink_to(ram_path / "other" / "iter_0000010")
    with pytest.raises(CheckpointError, match="symbolic link"):
        load(ram_path / "run")


FORBIDDEN = re.compile(
    r"pickle\.loads?\(|cPickle|Unpickler|weights_only\s*=\s*False|allow_pickle\s*=\s*True"
    r"|(?<![\w.])eval\(|yaml\.(load|unsafe_load|full_load)\(|marshal\.loads?|shelve\."
)


def executes_nothing(node: ast.AST) -> bool:
    """Return whether a call of torch.load, if the node is one, is told to read data alone."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
        return True
    words = {word.arg: ast.unparse(word.value) for word in node.keywords}
    return words.get("weights_only") == "True"


def test_no_file_of_the_product_can_run_what_it_reads() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    checked = [name for name in listed if not name.startswith("tests/")]
    assert len(checked) > 50
    found = []
    for name in checked:
        path = REPOSITORY / name
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        if "torch.load" in text and not all(map(executes_nothing, ast.walk(ast.parse(text)))):
            found.append(f"{name}: torch.load")
        for number, line in enumerate(text.splitlines(), 1):
            if FORBIDDEN.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
