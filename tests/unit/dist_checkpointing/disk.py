"""A disk that can be stopped at any system call, or lose power. Several threads may use it.

`Disk` stands in for the `os` functions that change files. It does what they do, and also keeps a
model of what would be on the platters: contents as of the last fsync of the file, names as of the
last fsync of the directory. A stop freezes everything: after it no call has any effect, so that
clean-up code cannot tidy what a killed process would have left.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """The process is gone; no `except Exception` runs."""


class Inode:
    """A file or directory of the model."""

    def __init__(self, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.data = b""
        self.synced = b""
        self.names: dict[str, Inode] = {}
        self.synced_names: dict[str, Inode] = {}


class Disk:
    """Records and stops the changes below `root`."""

    CHANGES = (
        "open",
        "write",
        "fsync",
        "rename",
        "unlink",
        "rmdir",
        "mkdir",
        "ftruncate",
        "pwrite",
    )

    def __init__(self, root: Path, *, stop_at: int | None = None) -> None:
        self.root = root
        self.stop_at = stop_at
        self.count = 0
        self.log: list[str] = []
        self.on_change: Callable[[Disk], None] | None = None
        self.fail: Callable[[str, str], OSError | None] = lambda call, path: None
        self._real = {name: getattr(os, name) for name in (*self.CHANGES, "close")}
        self._open_files: dict[int, str] = {}
        self._lock = threading.Lock()
        self.inode = self._scan(root)

    def _scan(self, path: Path) -> Inode:
        """Model what is there already, all of it synced."""
        node = Inode(path.is_dir())
        if node.is_directory:
            node.names = {p.name: self._scan(p) for p in path.iterdir()}
            node.synced_names = dict(node.names)
        else:
            node.data = node.synced = path.read_bytes()
        return node

    # The model ------------------------------------------------------------------------------

    def _find(self, path: str) -> Inode:
        node = self.inode
        for part in Path(path).relative_to(self.root).parts:
            node = node.names[part]
        return node

    def _parent(self, path: str) -> tuple[Inode, str]:
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def lost_power(self, *, keeps_unsynced_names: bool, keeps_half: bool = False) -> Inode:
        """Return what a power failure leaves.

        Args:
            keeps_unsynced_names: names that were changed without fsync of their directory have
                reached the disk (with contents that may not have).
            keeps_half: of unsynced contents the first half has reached the disk.
        """

        def survive(node: Inode) -> Inode:
            left = Inode(node.is_directory)
            names = node.names if keeps_unsynced_names else node.synced_names
            left.names = {name: survive(child) for name, child in names.items()}
            left.data = node.synced
            if keeps_half and node.data != node.synced:
                left.data = node.data[: len(node.data) // 2]
            return left

        return survive(self.inode)

    # The calls ------------------------------------------------------------------------------

    def _change(self, call: str, path: str) -> None:
        with self._lock:
            if self.stop_at is not None and self.count >= self.stop_at:
                raise Killed
            error = self.fail(call, path)
            if error is not None:
                raise error
            self.count += 1
            self.log.append(f"{call} {os.path.relpath(path, self.root)}")

    def _full(self, path: Any, dir_fd: int | None) -> str:
        path = os.fspath(path)
        return os.path.join(self._open_files[dir_fd], path) if dir_fd is not None else path

    def _inside(self, path: str) -> bool:
        return os.path.abspath(path).startswith(str(self.root))

    def open(self, path, flags, mode=0o777, *, dir_fd=None) -> int:
        full = self._full(path, dir_fd)
        creates = bool(flags & os.O_CREAT) and not os.path.lexists(full)
        if creates and self._inside(full):
            self._change("create", full)
        descriptor = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if self._inside(full):
            self._open_files[descriptor] = full
            if creates:
                parent, name = self._parent(full)
                parent.names[name] = Inode(is_directory=False)
                self._changed()
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open_files.pop(descriptor, None)
        self._real["close"](descriptor)

    def write(self, descriptor: int, data) -> int:
        path = self._open_files.get(descriptor)
        if path is None:
            return self._real["write"](descriptor, data)
        self._change("write", path)
        node = self._find(path)
        written = self._real["write"](descriptor, data)
        node.data += bytes(data)[:written]
        self._changed()
        return written

    def fsync(self, descriptor: int) -> None:
        path = self._open_files.get(descriptor)
        if path is None:
            return self._real["fsync"](descriptor)
        self._change("fsync", path)
        node = self._find(path)
        node.synced, node.synced_names = node.data, dict(node.names)
        self._changed()

    def rename(self, source, target, *, src_dir_fd=None, dst_dir_fd=None) -> None:
        source, target = os.fspath(source), os.fspath(target)
        if not self._inside(source):
            return self._real["rename"](source, target)
        self._change("rename", source)
        self._real["rename"](source, target)
        (old_parent, old), (new_parent, new) = self._parent(source), self._parent(target)
        new_parent.names[new] = old_parent.names.pop(old)
        self._changed()

    def mkdir(self, path, mode=0o777, *, dir_fd=None) -> None:
        full = self._full(path, dir_fd)
        if not self._inside(full):
            return self._real["mkdir"](path, mode, dir_fd=dir_fd)
        self._change("mkdir", full)
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        parent, name = self._parent(full)
        parent.names[name] = Inode(is_directory=True)
        self._changed()

    def _remove(self, call: str, path, dir_fd: int | None) -> None:
        full = self._full(path, dir_fd)
        if not self._inside(full):
            return self._real[call](path, dir_fd=dir_fd)
        self._change(call, full)
        self._real[call](path, dir_fd=dir_fd)
        parent, name = self._parent(full)
        del parent.names[name]
        self._changed()

    def unlink(self, path, *, dir_fd=None) -> None:
        self._remove("unlink", path, dir_fd)

    def rmdir(self, path, *, dir_fd=None) -> None:
        self._remove("rmdir", path, dir_fd)

    def ftruncate(self, descriptor: int, length: int) -> None:
        path = self._open_files.get(descriptor)
        if path is not None:
            self._change("ftruncate", path)
            self._find(path).data = self._find(path).data[:length]
        self._real["ftruncate"](descriptor, length)

    def pwrite(self, descriptor: int, data, offset: int) -> int:
        path = self._open_files.get(descriptor)
        if path is None:
            return self._real["pwrite"](descriptor, data, offset)
        self._change("pwrite", path)
        written = self._real["pwrite"](descriptor, data, offset)
        with self._lock:
            node = self._find(path)
            before, after = node.data[:offset].ljust(offset, b"\0"), node.data[offset + written :]
            node.data = before + bytes(data)[:written] + after
        self._changed()
        return written

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self)


@contextmanager
def on_disk(disk: Disk) -> Iterator[Disk]:
    """Let all file changes of this process go through `disk`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*Disk.CHANGES, "close"):
            patch.setattr(os, name, getattr(disk, name))
        # The removal of a tree by descriptors needs these to be known as capable of it.
        capable = {*os.supports_dir_fd, disk.open, disk.unlink, disk.rmdir}
        patch.setattr(os, "supports_dir_fd", capable)
        yield disk


def lay_out(node: Inode, path: Path) -> None:
    """Write a modelled tree into a real directory, which is emptied first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, child in node.names.items():
        if child.is_directory:
            lay_out(child, path / name)
        else:
            (path / name).write_bytes(child.data)


def fingerprint(node: Inode) -> bytes:
    """Return a hash of a modelled tree."""
    state = hashlib.sha256(node.data)
    for name, child in sorted(node.names.items()):
        state.update(name.encode() + bytes([child.is_directory]) + fingerprint(child))
    return state.digest()
