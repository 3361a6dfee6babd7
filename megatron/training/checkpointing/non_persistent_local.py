"""Non-persistent checkpoints on each node's own storage, with copies on a neighbour.

    DIR/rank_00003/iter_0000040           what rank 3 holds
    DIR/copy_of_rank_00001/iter_0000040   what rank 1 holds, kept for it on another node

Each rank saves what it holds, without asking others what they hold; then the files travel once
around a ring. A run that lost a process, or a node with its storage, starts again in the same
layout from its own files or from the neighbour's. The newest iteration is taken that every rank can
get; files are verified as they are read. These checkpoints are in addition to those of `--save`,
never instead of them.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import print_once, run_collectively
from megatron.core.dist_checkpointing.loader import Contents, open_contents
from megatron.core.dist_checkpointing.local_state import as_local_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.peer_replication import sendrecv_directories
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    ControlGroup,
    SingleProcess,
    TorchControlGroup,
)
from megatron.training.checkpointing.restore import Restored, Restorer


@dataclass(frozen=True)
class LocalSettings:
    """Where non-persistent checkpoints live and how often they are copied."""

    directory: Path
    num_copies: int = 1
    """Copies on other nodes, besides the rank's own files."""
    distance: int = 1
    """Ranks between the owner and the holder of a copy: the number of ranks per node."""
    belongs_to: str = ""
    """The run's save directory: what another run left here is not taken for ours."""


@dataclass(frozen=True)
class Restorable:
    """An iteration that every rank can load."""

    iteration: int
    replicas: Mapping[int, int]
    """Rank without intact files of its own -> number of its copy that is intact."""


@functools.lru_cache(maxsize=1)
def own_group(world: dist.ProcessGroup) -> TorchControlGroup:
    """Return a group on the host's network whose messages never meet those of training: made once
    for all runs of the processes' group."""
    ranks = dist.get_process_group_ranks(world)
    return TorchControlGroup(dist.new_group(ranks, backend="gloo"))


def _check_replicas(settings: LocalSettings, size: int) -> None:
    for number in range(1, min(settings.num_copies, size - 1) + 1):
        if number * settings.distance % size == 0:
            raise CheckpointError(
                f"copy {number} at a distance of {number} x {settings.distance} of {size} ranks "
                "would be with its owner.",
                rule="a copy outlives its owner only elsewhere",
                flags=["--replication-jump", "--replication-factor"],
                fix=f"use a --replication-jump of which {number} times is no multiple of {size}",
            )


class LocalCheckpoints:
    """The non-persistent checkpoints of one run. Every public method is a collective."""

    def __init__(
        self, settings: LocalSettings, layout: Mapping[str, object], peers: ControlGroup
    ) -> None:
        """
        Args:
            layout: sizes of all axes; checkpoints of another layout are passed over.
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
        """Save what this rank holds, copy it to the neighbours, then drop older iterations.

        Raises:
            CheckpointError: on every rank; the earlier non-persistent checkpoint is intact.
        """
        name = commit.iteration_directory(iteration)
        info = {
            "layout": self.layout,
            "world_size": self.peers.size,
            "belongs_to": self.settings.belongs_to,
        }

        def write() -> None:
            dist_checkpointing.save(
                as_local_state(state), self._own / name, process_group=SingleProcess(), info=info
            )

        run_collectively(self.peers, "saving a non-persistent checkpoint", write)
        if self._group is not None:
            for number in range(1, self._num_copies + 1):
                send_to, receive_from = self._neighbours(number)
                target = self._copy_of(receive_from) / name
                sendrecv_directories(
                    self._own / name,
                    target,
                    send_to=send_to,
                    receive_from=receive_from,
                    peers=self._group,
                )
        run_collectively(
            self.peers, "deleting non-persistent checkpoints", lambda: self._keep_only(name)
        )

    def load_newer(self, than: int, restorer: Restorer) -> Restored | None:
        """Load the newest iteration that every rank can get, if it is later than `than`."""
        found = self.newest()
        if found is None or found.iteration <= than:
            return None
        for rank, number in found.replicas.items():
            print_once(
                self.peers, f"  rank {rank} gets its non-persistent checkpoint from copy {number}"
            )
        return restorer.restore_local(self.fetch(found))

    def newest(self) -> Restorable | None:
        """Return the newest iteration that every rank can load; all files are verified."""
        mine: dict[int, set[int]] = {}  # iteration -> ranks whose state is stored here

        def look() -> None:
            for rank in self._stored_ranks():
                for iteration in self._usable(self._directory_of(rank)):
                    mine.setdefault(iteration, set()).add(rank)

        run_collectively(self.peers, "looking for non-persistent checkpoints", look)
        gathered = self.peers.gather(mine)
        best = None if gathered is None else self._best(gathered)
        found: Restorable | None = self.peers.broadcast(best)
        return found

    def fetch(self, restorable: Restorable) -> Contents:
        """Get back what is missing from the neighbours, and open this rank's own files."""
        name = commit.iteration_directory(restorable.iteration)
        if restorable.replicas:
            self._fetch_replicas(restorable, name)

        def open_own() -> Contents:
            return open_contents(self._own / name, peers=SingleProcess())

        return run_collectively(self.peers, "opening a non-persistent checkpoint", open_own)

    # Directories ----------------------------------------------------------------------------

    @property
    def _num_copies(self) -> int:
        return min(self.settings.num_copies, self.peers.size - 1)

    def _neighbours(self, number: int) -> tuple[int, int]:
        """Return (rank to send to, rank to receive from) of the n-th copy."""
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
        """Yield iterations in a directory that are intact, of this layout and of this run."""
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
        """Choose the newest iteration for which every rank's state can be fetched."""

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
        """Let holders send to the ranks whose own files are gone, one copy after another."""
        assert self._group is not None
        for number in sorted(set(restorable.replicas.values())):
            holder, owner = self._neighbours(number)
            sendrecv_directories(
                self._copy_of(owner) / name if restorable.replicas.get(owner) == number else None,
                self._own / name if restorable.replicas.get(self.peers.rank) == number else None,
                send_to=owner,
                receive_from=holder,
                peers=self._group,
            )

    def _keep_only(self, name: str) -> None:
        """Delete other iterations and leftovers that this rank stores."""
        for rank in self._stored_ranks():
            directory = self._directory_of(rank)
            if not directory.is_dir():
                continue
            for path in directory.iterdir():
                if path.name.startswith("iter_") and path.name != name:
                    shutil.rmtree(path)
