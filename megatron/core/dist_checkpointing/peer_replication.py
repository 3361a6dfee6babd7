"""Copies of each rank's files on another node, sent without a shared file system.

Ranks form rings: rank r sends to rank r + distance and receives from rank r - distance. With a
distance of the ranks per node, a copy is on another node. All ranks send and receive at once, in
chunks, so a rank needs two chunks of memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import run_collectively
from megatron.core.dist_checkpointing.durable import open_file, write_all
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, METADATA_NAME
from megatron.core.dist_checkpointing.shard_file import as_bytes
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import TorchControlGroup, all_gather_object
from megatron.core.transport.work import Handle

CHUNK_BYTES = 16 << 20
_RUN = "c09e"
"""Marks the unfinished copy of a checkpoint, as a run's name does for an unfinished save."""


@dataclass(frozen=True)
class FileListing:
    """The files of one checkpoint directory, in the order they travel."""

    files: tuple[tuple[str, int], ...] = ()
    """(name, bytes)."""

    @staticmethod
    def of(directory: Path) -> FileListing:
        """Describe a checkpoint by its own manifest; files that it does not list are left out."""
        manifest = commit.open_checkpoint(directory)
        sizes = {name: file.size for name, file in manifest.files.items()}
        for name in (MANIFEST_NAME, METADATA_NAME):
            with open_file(directory, name) as file:
                sizes[name] = file.size
        return FileListing(tuple(sizes.items()))

    def chunks(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, first byte, bytes); no chunk is longer than CHUNK_BYTES."""
        for name, size in self.files:
            for begin in range(0, size, CHUNK_BYTES):
                yield name, begin, min(CHUNK_BYTES, size - begin)


def sendrecv_directories(
    source: Path | None,
    target: Path | None,
    *,
    send_to: int,
    receive_from: int,
    peers: TorchControlGroup,
) -> None:
    """Send a checkpoint directory to one rank while another sends one here: collective.

    Args:
        source: what to send; None sends nothing.
        target: where to put what comes, replaced when it is complete; hashes are checked when it
            is loaded. None where nothing comes.
        send_to, receive_from: ranks of `peers`; the other side names this one.
    Raises:
        CheckpointError: on every rank, if any rank could not read or write.
    """
    doing = "copying a checkpoint to another node"
    own = run_collectively(
        peers, doing, lambda: FileListing() if source is None else FileListing.of(source)
    )
    listings: list[FileListing] = all_gather_object(own, peers.group)
    coming = FileListing() if target is None else listings[receive_from]
    staging = None if target is None else commit.staging_directory(target, _RUN)

    def make_staging() -> None:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    run_collectively(peers, doing, make_staging)
    # What fails on one rank must not keep it from sending and receiving.
    problem: Exception | None = None
    outgoing, incoming = list(own.chunks()), list(coming.chunks())
    to_send, received = (torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2))
    for index in range(max(len(outgoing), len(incoming))):
        handles: list[Handle] = []
        if index < len(incoming):
            part = received[: incoming[index][2]]
            handles.append(torch_collectives.irecv(part, receive_from, peers.group))
        if index < len(outgoing):
            name, begin, count = outgoing[index]
            try:
                assert source is not None
                with open_file(source, name) as file:
                    file.read_into(as_bytes(to_send[:count]), begin)
            except Exception as error:
                problem = problem or error
            handles.append(torch_collectives.isend(to_send[:count], send_to, peers.group))
        for handle in handles:
            handle.wait()
        if index < len(incoming) and problem is None:
            try:
                assert staging is not None
                _append(staging, incoming[index], as_bytes(part))
            except Exception as error:
                problem = error

    def finish() -> None:
        if problem is not None:
            raise problem
        if staging is not None and target is not None:
            shutil.rmtree(target, ignore_errors=True)
            os.rename(staging, target)

    run_collectively(peers, doing, finish)


def _append(directory: Path, chunk: tuple[str, int, int], data: memoryview) -> None:
    name, begin, _ = chunk
    if name != os.path.basename(name):
        raise ValueError(f"a file name with a path in it: {name!r}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if not begin else 0)
    descriptor = os.open(directory / name, flags, 0o644)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)
