"""Decide which processes train together, from what is heard of them; no clock, no connection.

A process joins when it is there and has nothing to do: a new one after its imports, one that
trained after it has given up its groups. A generation is one set of ranks. It is broken by the end
or the failure of a member; then all that live join again, and the next generation has them and
those that have joined meanwhile. Growing is a change without a failure, at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.foundation.failure_file import USELESS_TO_REPEAT


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user allows."""

    max_ranks: int
    min_ranks: int
    """Fewer wait for more to come."""
    ranks_per_replica: int = 1
    """Ranks come and go by so many."""
    global_batch: int = 0
    """Samples of a step over the micro batch; 0: any number of replicas divides them."""
    max_same_failures: int = 3
    """So many failures of one class, rank and place in a row end the job."""
    start_s: float = 600.0
    """How long the first generation waits for all ranks."""
    meet_s: float = 30.0
    """How long a process may take to give up its groups before it is killed."""

    def size_for(self, available: int) -> int:
        """Return how many ranks train when so many processes are there; 0: they wait."""
        step = self.ranks_per_replica
        for size in range(min(available, self.max_ranks) // step * step, 0, -step):
            if size >= self.min_ranks and self.global_batch % (size // step) == 0:
                return size
        return 0


@dataclass(frozen=True)
class Place:
    """What a member of a generation is."""

    process: str
    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    node: int
    generation: int
    may_grow: bool


@dataclass(frozen=True)
class Cause:
    """Why a process ended."""

    text: str
    """The class of its failure, rank, iteration and place; empty if it was killed."""
    status: int

    @property
    def failure_class(self) -> str:
        """The word in FATAL[...]."""
        return self.text.partition("]")[0].removeprefix("FATAL[")


@dataclass
class Decision:
    """What follows from what was heard."""

    assigned: list[Place] = field(default_factory=list)
    broken: int | None = None
    """A generation to give up at once, and why."""
    reason: str = ""
    grows: int | None = None
    """A generation that is left after the step that is computed."""
    killed: list[str] = field(default_factory=list)
    status: int | None = None
    """The job is over."""


@dataclass
class Coordinator:
    """Hears of processes and decides; `decide` is called again and again."""

    limits: Limits
    generation: int = -1
    members: dict[str, int] = field(default_factory=dict)
    """Process -> rank."""
    node_of: dict[str, int] = field(default_factory=dict)
    """Of each process that lives."""
    waiting: set[str] = field(default_factory=set)
    is_broken: bool = True
    is_growing: bool = False
    num_failures: int = 0
    """Generations that were broken."""
    _finished: set[str] = field(default_factory=set)
    _since: float = 0.0
    _reason: str = ""
    _status: int | None = None
    _last_cause: str = ""
    _num_same: int = 0
    _has_told: bool = True

    def has_joined(self, process: str, node: int) -> None:
        """A process waits for something to do."""
        self.node_of[process] = node
        self.waiting.add(process)
        if process in self.members and not self.is_broken:
            self._break("the ranks change" if self.is_growing else f"{process} has left")

    def has_failed(self, generation: int, process: str) -> None:
        """A member met an error that comes from another's silence."""
        if generation == self.generation and not self.is_broken:
            self._break(f"{process} has lost a peer")

    def has_ended(self, process: str, cause: Cause) -> None:
        """A process is gone."""
        self.node_of.pop(process, None)
        self.waiting.discard(process)
        if cause.failure_class in USELESS_TO_REPEAT:
            self._status = cause.status
        elif cause.text and cause.failure_class not in ("PEER_LOST", "LAUNCHER_LOST"):
            self._num_same = self._num_same + 1 if cause.text == self._last_cause else 1
            self._last_cause = cause.text
            if self._num_same >= self.limits.max_same_failures:
                self._status = cause.status
        if process not in self.members:
            return
        if cause.status == 0 and not self.is_broken:
            self._finished.add(process)
            if len(self._finished) == len(self.members):
                self._status = 0
        elif not self.is_broken:
            self._break(f"rank {self.members[process]} ended with status {cause.status}")

    def _break(self, reason: str) -> None:
        self.is_broken, self._has_told, self._reason = True, False, reason
        self.num_failures += not self.is_growing
        self._since = 0.0

    def decide(self, now: float) -> Decision:
        """Return what is to be done at time `now`, in seconds of any clock."""
        decision = Decision(status=self._status)
        if self._status is not None:
            return decision
        if not self._has_told:
            decision.broken, decision.reason = self.generation, self._reason
            self._has_told = True
        if self.is_broken:
            self._since = self._since or now
            self._meet(now, decision)
        elif not self.is_growing and len(self.members) < self.limits.max_ranks:
            living = len(self.members) + len(self.waiting)
            if self.limits.size_for(living) > len(self.members):
                self.is_growing, decision.grows = True, self.generation
        return decision

    def _meet(self, now: float, decision: Decision) -> None:
        late = [p for p in self.members if p in self.node_of and p not in self.waiting]
        if late:
            if now - self._since > self.limits.meet_s:
                decision.killed += late
                self._since = now
            return
        size = self.limits.size_for(len(self.waiting))
        is_first = self.generation < 0
        waits = is_first and now - self._since < self.limits.start_s
        if size == 0 or (size < self.limits.max_ranks and waits):
            return
        self._assign(size, decision)

    def _assign(self, size: int, decision: Decision) -> None:
        """Give ranks to processes: members keep their order, those of a node follow each other."""
        former = self.members

        def order(process: str) -> tuple[bool, int, str]:
            return process not in former, former.get(process, 0), process

        chosen = sorted(self.waiting, key=order)[:size]
        placed = sorted(chosen, key=lambda p: (self.node_of[p], *order(p)))
        self.generation += 1
        nodes = [self.node_of[process] for process in placed]
        self.members = {process: rank for rank, process in enumerate(placed)}
        for rank, (process, node) in enumerate(zip(placed, nodes, strict=True)):
            local_size = nodes.count(node)
            place = Place(
                process, rank, rank - nodes.index(node), local_size, size, node, self.generation,
                size < self.limits.max_ranks,
            )  # fmt: skip
            decision.assigned.append(place)
            self.waiting.discard(process)
        self.is_broken = self.is_growing = False
        self._finished, self._since = set(), 0.0


def lost(processes: Sequence[str], node: str) -> list[str]:
    """Return the processes of a launcher."""
    return [process for process in processes if process.partition("/")[0] == node]
