"""Non-persistent checkpoints for fast restarts; each replaces the previous one.

The kind "global" is one checkpoint in a separate directory, which all ranks write. In the kind
"local", each rank writes to the storage of its node, and other nodes hold copies:

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
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import (
    print_once,
    run_collectively,
    run_on_coordinator,
)
from megatron.core.dist_checkpointing.durable import open_file, write_all
from megatron.core.dist_checkpointing.loader import open_contents
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, METADATA_NAME
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.dist_checkpointing.shard_file import as_bytes
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError, ConfigError
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    ControlGroup,
    SingleProcess,
    TorchControlGroup,
    all_gather_object,
)
from megatron.core.transport.work import Handle
from megatron.training.checkpointing.restore import Restored, Restorer, as_local_state
from megatron.training.config.checkpoint import CheckpointSettings


@functools.lru_cache(maxsize=1)
def own_group(world: dist.ProcessGroup) -> TorchControlGroup:
    """Return a gloo group of all ranks, separate from the training groups and made once."""
    ranks = dist.get_process_group_ranks(world)
    return TorchControlGroup(dist.new_group(ranks, backend="gloo"))


class GlobalCheckpoints:
    """The single global non-persistent checkpoint of a run, which loads in any layout.

    Methods are collectives; the caller makes all ranks raise the same error.
    """

    def __init__(
        self, directory: StoragePath, layout: Mapping[str, object], peers: ControlGroup
    ) -> None:
        self.directory, self.layout, self.peers = directory, dict(layout), peers

    def save(self, state: ShardedStateDict, iteration: int) -> None:
        """Save a checkpoint, then delete the previous one."""
        final = self.directory / commit.iteration_directory(iteration)
        dist_checkpointing.save(
            state, final, process_group=self.peers, info={"layout": self.layout}
        )
        if self.peers.rank == 0:
            commit.remove_leftovers(self.directory)
            for found in commit.list_checkpoints(self.directory).checkpoints:
                if found.path != final:
                    commit.remove_checkpoint(found, "0")

    def load_newer(self, than: int, restorer: Restorer) -> Restored | None:
        """Load the checkpoint into the run if its iteration is later than `than`."""

        def find() -> StoragePath | None:
            found = commit.list_checkpoints(self.directory).checkpoints[:1]
            newer = (f.path for f in found if isinstance(f.iteration, int) and f.iteration > than)
            return next(newer, None)

        path = run_on_coordinator(self.peers, find, doing="reading", path=self.directory)
        if path is None:
            return None
        return restorer.restore(open_contents(path, peers=self.peers), is_finetuning=False)


class LocalCheckpoints:
    """The non-persistent checkpoints of one run. Every public method is a collective."""

    def __init__(
        self,
        settings: CheckpointSettings,
        home: str,
        layout: Mapping[str, object],
        peers: ControlGroup,
    ) -> None:
        """
        Args:
            home: the run's save directory, which distinguishes its files from other runs' files.
            layout: sizes of all axes; checkpoints of other layouts are ignored.
            peers: the ranks of the run.
        """
        if settings.non_persistent_local_ckpt_dir is None:
            raise ConfigError(
                "--non-persistent-ckpt-type local without --non-persistent-local-ckpt-dir.",
                rule="local checkpoints are kept in a directory of each node",
                flags=["--non-persistent-local-ckpt-dir"],
                fix="add --non-persistent-local-ckpt-dir DIRECTORY, or use the type global",
            )
        self._directory, self.peers = Path(settings.non_persistent_local_ckpt_dir), peers
        self._info = {
            "layout": dict(layout),
            "world_size": peers.size,
            "belongs_to": os.path.abspath(home),
        }
        self._distance = settings.replication_jump or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_wanted = settings.replication_factor - 1 if settings.replication else 0
        self._copy_numbers = range(1, min(num_wanted, peers.size - 1) + 1)
        self._own = self._directory / f"rank_{peers.rank:05d}"
        self._group: TorchControlGroup | None = None
        if peers.size > 1:
            self._check_replicas()
            world = torch_collectives.world()
            assert isinstance(world, dist.ProcessGroup), "there are peers"
            self._group = own_group(world)

    def _check_replicas(self) -> None:
        size = self.peers.size
        for number in self._copy_numbers:
            if number * self._distance % size == 0:
                raise CheckpointError(
                    f"copy {number} at a distance of {number} x {self._distance} of {size} ranks "
                    "would be on the rank that owns it.",
                    rule="a copy and its owner are on different ranks",
                    flags=["--replication-jump", "--replication-factor"],
                    fix=f"use a --replication-jump such that {number} x --replication-jump is no "
                    f"multiple of {size}",
                )

    def save(self, state: ShardedStateDict, iteration: int) -> None:
        """Save this rank's shards, send copies to other ranks, and delete older iterations.

        Raises:
            CheckpointError: on every rank; the earlier non-persistent checkpoint is intact.
        """
        name = commit.iteration_directory(iteration)

        def write() -> list[tuple[int, int, Path]]:
            dist_checkpointing.save(
                as_local_state(state),
                self._own / name,
                process_group=SingleProcess(),
                info=self._info,
            )
            neighbours = map(self._neighbours, self._copy_numbers)
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
        for directory in self._stored().values():
            for path in directory.iterdir() if directory.is_dir() else ():
                if path.name.startswith("iter_") and path.name != name:
                    shutil.rmtree(path)

    def load_newer(self, than: int, restorer: Restorer) -> Restored | None:
        """Load the newest iteration available for every rank, if it is later than `than`."""
        mine: dict[int, set[int]] = {}  # iteration -> ranks whose shards this rank stores
        for rank, directory in self._stored().items():
            for iteration in self._usable(directory):
                mine.setdefault(iteration, set()).add(rank)
        gathered = self.peers.gather(mine)
        found = self.peers.broadcast(None if gathered is None else self._best(gathered))
        if found is None or found[0] <= than:
            return None
        iteration, replicas = found
        name = commit.iteration_directory(iteration)
        for rank, number in replicas.items():
            print_once(
                self.peers, f"  rank {rank} gets its non-persistent checkpoint from copy {number}"
            )
        if replicas:
            self._fetch_replicas(replicas, name)
        return restorer.restore_local(open_contents(self._own / name, peers=SingleProcess()))

    def _neighbours(self, number: int) -> tuple[int, int]:
        """Return (rank to send to, rank to receive from) for the n-th copy."""
        step, rank, size = number * self._distance, self.peers.rank, self.peers.size
        return (rank + step) % size, (rank - step) % size

    def _copy_of(self, rank: int) -> Path:
        return self._directory / f"copy_of_rank_{rank:05d}"

    def _stored(self) -> dict[int, Path]:
        """Return the ranks whose shards this rank stores, with their directories."""
        sources = {self._neighbours(number)[1] for number in self._copy_numbers}
        copies = {rank: self._copy_of(rank) for rank in sorted(sources)}
        return copies | {self.peers.rank: self._own}

    def _usable(self, directory: Path) -> Iterator[int]:
        """Yield the intact iterations in a directory that this run saved in this layout."""
        for found in commit.list_checkpoints(directory).checkpoints:
            try:
                info = commit.open_checkpoint(found.path).info
            except CheckpointError:
                continue
            is_ours = all(info.get(name) == value for name, value in self._info.items())
            is_iteration = isinstance(found.iteration, int)
            if is_ours and is_iteration and not verify_checkpoint(found.path).problems:
                yield int(found.iteration)

    def _best(self, gathered: list[dict[int, set[int]]]) -> tuple[int, dict[int, int]] | None:
        """Choose the newest iteration for which the shards of every rank are stored somewhere.

        Returns:
            (iteration, {rank without intact own files: number of its intact copy}).
        """
        size = self.peers.size
        for iteration in sorted({i for found in gathered for i in found}, reverse=True):
            replicas: dict[int, int] = {}
            for rank in range(size):
                number = next(
                    (
                        n
                        for n in (0, *self._copy_numbers)
                        if rank in gathered[(rank + n * self._distance) % size].get(iteration, ())
                    ),
                    None,
                )
                if number is None:
                    break
                if number > 0:
                    replicas[rank] = number
            else:
                return iteration, replicas
        return None

    def _fetch_replicas(self, replicas: Mapping[int, int], name: str) -> None:
        """Send copies to the ranks that have lost their own files, one copy number at a time."""
        assert self._group is not None

        def plan() -> list[tuple[Path | None, Path | None, int, int]]:
            found = []
            for number in sorted(set(replicas.values())):
                holder, owner = self._neighbours(number)
                source = self._copy_of(owner) / name if replicas.get(owner) == number else None
                receives = replicas.get(self.peers.rank) == number
                found.append((source, self._own / name if receives else None, owner, holder))
            return found

        for source, target, owner, holder in run_collectively(
            self.peers, "looking for copies of checkpoints", plan
        ):
            sendrecv_directories(
                source, target, send_to=owner, receive_from=holder, peers=self._group
            )


NonPersistentCheckpoints = LocalCheckpoints | GlobalCheckpoints


def open_non_persistent(
    settings: CheckpointSettings, layout: Mapping[str, object], peers: ControlGroup
) -> NonPersistentCheckpoints | None:
    """Return the non-persistent checkpoints of the settings. Collective; may make a group."""
    home = settings.save or settings.load or ""
    if settings.non_persistent_ckpt_type == "global":
        directory = settings.non_persistent_global_ckpt_dir or os.path.join(home, "non_persistent")
        return GlobalCheckpoints(storage_path(directory), layout, peers)
    if settings.non_persistent_ckpt_type != "local":
        return None
    return LocalCheckpoints(settings, home, layout, peers)


CHUNK_BYTES = 16 << 20
_RUN = "c09e"
"""Name of an unfinished copy, in place of the run's name in the name of an unfinished save."""
Chunk = tuple[str, int, int]
"""(file name, first byte, bytes); at most CHUNK_BYTES."""


def _chunks(directory: Path) -> list[Chunk]:
    """Return all bytes of the files of a checkpoint, in the order of sending."""
    manifest = commit.open_checkpoint(directory)
    sizes = {name: file.size for name, file in manifest.files.items()}
    for name in (MANIFEST_NAME, METADATA_NAME):
        with open_file(directory, name) as file:
            sizes[name] = file.size
    return [
        (name, begin, min(CHUNK_BYTES, size - begin))
        for name, size in sizes.items()
        for begin in range(0, size, CHUNK_BYTES)
    ]


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
    outgoing = run_collectively(peers, doing, lambda: [] if source is None else _chunks(source))
    listings: list[list[Chunk]] = all_gather_object(outgoing, peers.group)
    incoming = [] if target is None else listings[receive_from]
    staging = None if target is None else commit.staging_directory(target, _RUN)

    def make_staging() -> None:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    run_collectively(peers, doing, make_staging)
    # A rank with an error still sends and receives, so that its peers do not hang.
    problem: Exception | None = None
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


def _append(directory: Path, chunk: Chunk, data: memoryview) -> None:
    name, begin, _ = chunk
    if name != os.path.basename(name):
        raise ValueError(f"a file name contains a path: {name!r}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if not begin else 0)
    descriptor = os.open(directory / name, flags, 0o644)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)
