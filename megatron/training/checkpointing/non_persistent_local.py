"""Non-persistent checkpoints on each node's own storage, with copies on other nodes.

    DIR/rank_00003/iter_0000040           shards of rank 3, on its node
    DIR/copy_of_rank_00001/iter_0000040   copy of the shards of rank 1, on another node

Each rank saves its own shards without a global plan. Then the ranks exchange copies in a ring,
without a shared file system: rank r sends to rank r + distance and receives from rank r - distance.
If the distance is the number of ranks per node, a copy is on another node. All ranks send and
receive at once, in chunks, so a rank needs memory for two chunks.

After the loss of a process, or of a node with its storage, the run restarts in the same layout from
its own files and the copies. It loads the newest iteration that is available for every rank, and
verifies files while reading. Checkpoints of `--save` are independent of these.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import print_once, run_collectively
from megatron.core.dist_checkpointing.durable import open_file, write_all
from megatron.core.dist_checkpointing.loader import Contents, open_contents
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, METADATA_NAME
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.shard_file import as_bytes
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    ControlGroup,
    SingleProcess,
    TorchControlGroup,
    all_gather_object,
)
from megatron.core.transport.work import Handle
from megatron.training.checkpointing.restore import Restored, Restorer, as_local_state


@dataclass(frozen=True)
class LocalSettings:
    """Directory and replication of local checkpoints."""

    directory: Path
    num_copies: int = 1
    """Copies on other nodes, in addition to the rank's own files."""
    distance: int = 1
    """Distance in ranks between the owner and the holder of a copy: the ranks per node."""
    belongs_to: str = ""
    """The run's save directory, which distinguishes its files from other runs' files."""


@dataclass(frozen=True)
class Restorable:
    """An iteration that every rank can load."""

    iteration: int
    replicas: Mapping[int, int]
    """Rank without intact own files -> number of its intact copy."""


@functools.lru_cache(maxsize=1)
def own_group(world: dist.ProcessGroup) -> TorchControlGroup:
    """Return a gloo group of all ranks, separate from the training groups and made once."""
    ranks = dist.get_process_group_ranks(world)
    return TorchControlGroup(dist.new_group(ranks, backend="gloo"))


def _check_replicas(settings: LocalSettings, size: int) -> None:
    for number in range(1, min(settings.num_copies, size - 1) + 1):
        if number * settings.distance % size == 0:
            raise CheckpointError(
                f"copy {number} at a distance of {number} x {settings.distance} of {size} ranks "
                "would be on the rank that owns it.",
                rule="a copy and its owner are on different ranks",
                flags=["--replication-jump", "--replication-factor"],
                fix=f"use a --replication-jump such that {number} x --replication-jump is no "
                f"multiple of {size}",
            )


class LocalCheckpoints:
    """The non-persistent checkpoints of one run. Every public method is a collective."""

    def __init__(
        self, settings: LocalSettings, layout: Mapping[str, object], peers: ControlGroup
    ) -> None:
        """
        Args:
            layout: sizes of all axes; checkpoints of other layouts are ignored.
            peers: the ranks of the run.
        """
        self.settings, self.layout, self.peers = settings, dict(layout), peers
        self._own = settings.directory / f"rank_{peers.rank:05d}"
        self._group: TorchControlGroup | None = None
        if peers.size > 1:
            _check_replicas(settings, peers.size)
            world = torch_collectives.world()
            assert isinstance(world, dist.ProcessGroup), "there are peers"
            self._group = own_group(world)

    def save(self, state: ShardedStateDict, iteration: int) -> None:
        """Save this rank's shards, send copies to other ranks, and delete older iterations.

        Raises:
            CheckpointError: on every rank; the earlier non-persistent checkpoint is intact.
        """
        name = commit.iteration_directory(iteration)
        info = {
            "layout": self.layout,
            "world_size": self.peers.size,
            "belongs_to": self.settings.belongs_to,
        }

        def write() -> list[tuple[int, int, Path]]:
            dist_checkpointing.save(
                as_local_state(state), self._own / name, process_group=SingleProcess(), info=info
            )
            neighbours = [self._neighbours(n) for n in range(1, self._num_copies + 1)]
            return [(to, source, self._copy_of(source) / name) for to, source in neighbours]

        copies = run_collectively(self.peers, "saving a non-persistent checkpoint", write)
        if self._group is not None:
            for send_to, receive_from, target in copies:
                sendrecv_directories(
                    self._own / name,
                    target,
                    send_to=send_to,
                    receive_from=receive_from,
                    peers=self._group,
                )
        self._keep_only(name)

    def load_newer(self, than: int, restorer: Restorer) -> Restored | None:
        """Load the newest iteration available for every rank, if it is later than `than`."""
        found = self.newest()
        if found is None or found.iteration <= than:
            return None
        for rank, number in found.replicas.items():
            print_once(
                self.peers, f"  rank {rank} gets its non-persistent checkpoint from copy {number}"
            )
        return restorer.restore_local(self.fetch(found))

    def newest(self) -> Restorable | None:
        """Return the newest iteration available for every rank; all files are verified."""
        mine: dict[int, set[int]] = {}  # iteration -> ranks whose shards this rank stores

        for rank in self._stored_ranks():
            for iteration in self._usable(self._directory_of(rank)):
                mine.setdefault(iteration, set()).add(rank)
        gathered = self.peers.gather(mine)
        best = None if gathered is None else self._best(gathered)
        found: Restorable | None = self.peers.broadcast(best)
        return found

    def fetch(self, restorable: Restorable) -> Contents:
        """Receive missing files from the holders of copies, and open this rank's own files."""
        name = commit.iteration_directory(restorable.iteration)
        if restorable.replicas:
            self._fetch_replicas(restorable, name)
        return open_contents(self._own / name, peers=SingleProcess())

    # Directories ----------------------------------------------------------------------------

    @property
    def _num_copies(self) -> int:
        return min(self.settings.num_copies, self.peers.size - 1)

    def _neighbours(self, number: int) -> tuple[int, int]:
        """Return (rank to send to, rank to receive from) for the n-th copy."""
        step, rank, size = number * self.settings.distance, self.peers.rank, self.peers.size
        return (rank + step) % size, (rank - step) % size

    def _holders(self, rank: int) -> Iterator[int]:
        for number in range(1, self._num_copies + 1):
            yield (rank + number * self.settings.distance) % self.peers.size

    def _copy_of(self, rank: int) -> Path:
        return self.settings.directory / f"copy_of_rank_{rank:05d}"

    def _directory_of(self, rank: int) -> Path:
        return self._own if rank == self.peers.rank else self._copy_of(rank)

    def _stored_ranks(self) -> list[int]:
        stored = {self._neighbours(n)[1] for n in range(1, self._num_copies + 1)}
        return [self.peers.rank, *sorted(stored - {self.peers.rank})]

    # Steps ----------------------------------------------------------------------------------

    def _usable(self, directory: Path) -> Iterator[int]:
        """Yield the intact iterations in a directory that this run saved in this layout."""
        for found in commit.list_checkpoints(directory).checkpoints:
            try:
                info = commit.open_checkpoint(found.path).info
            except CheckpointError:
                continue
            is_ours = (
                isinstance(found.iteration, int)
                and info.get("layout") == self.layout
                and info.get("world_size") == self.peers.size
                and info.get("belongs_to") == self.settings.belongs_to
            )
            if is_ours and not verify_checkpoint(found.path).problems:
                yield int(found.iteration)

    def _best(self, gathered: list[dict[int, set[int]]]) -> Restorable | None:
        """Choose the newest iteration for which the shards of every rank are stored somewhere."""

        def has(holder: int, iteration: int, rank: int) -> bool:
            return rank in gathered[holder].get(iteration, ())

        for iteration in sorted({i for found in gathered for i in found}, reverse=True):
            replicas: dict[int, int] = {}
            for rank in range(self.peers.size):
                holders = enumerate([rank, *self._holders(rank)])
                number = next((n for n, holder in holders if has(holder, iteration, rank)), None)
                if number is None:
                    break
                if number > 0:
                    replicas[rank] = number
            else:
                return Restorable(iteration, replicas)
        return None

    def _fetch_replicas(self, restorable: Restorable, name: str) -> None:
        """Send copies to the ranks that have lost their own files, one copy number at a time."""
        assert self._group is not None
        mine = self.peers.rank

        def plan() -> list[tuple[Path | None, Path | None, int, int]]:
            found = []
            for number in sorted(set(restorable.replicas.values())):
                holder, owner = self._neighbours(number)
                sends = restorable.replicas.get(owner) == number
                receives = restorable.replicas.get(mine) == number
                source = self._copy_of(owner) / name if sends else None
                found.append((source, self._own / name if receives else None, owner, holder))
            return found

        for source, target, owner, holder in run_collectively(
            self.peers, "looking for copies of checkpoints", plan
        ):
            sendrecv_directories(
                source, target, send_to=owner, receive_from=holder, peers=self._group
            )

    def _keep_only(self, name: str) -> None:
        """Delete other iterations and unfinished files that this rank stores."""
        for rank in self._stored_ranks():
            directory = self._directory_of(rank)
            if not directory.is_dir():
                continue
            for path in directory.iterdir():
                if path.name.startswith("iter_") and path.name != name:
                    shutil.rmtree(path)


CHUNK_BYTES = 16 << 20
_RUN = "c09e"
"""Name of an unfinished copy, in place of the run's name in the name of an unfinished save."""


@dataclass(frozen=True)
class FileListing:
    """The files of one checkpoint directory, in the order of sending."""

    files: tuple[tuple[str, int], ...] = ()
    """(name, bytes)."""

    @staticmethod
    def of(directory: Path) -> FileListing:
        """List the files in a checkpoint's manifest, and the manifest itself."""
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
    """Send a checkpoint directory to one rank and receive one from another rank. Collective.

    Args:
        source: the directory to send, or None.
        target: the directory to receive into, or None. It is replaced after all bytes have
            arrived; loading verifies the hashes.
        send_to, receive_from: ranks of `peers`.
    Raises:
        CheckpointError: on every rank, if any rank cannot read or write.
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
    # A rank with an error still sends and receives, so that its peers do not hang.
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
        raise ValueError(f"a file name contains a path: {name!r}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if not begin else 0)
    descriptor = os.open(directory / name, flags, 0o644)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)
