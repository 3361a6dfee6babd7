"""Decide which processes train together, from reports about them; without clock and connections.

A process joins when it is idle: newly started, or released from its previous process groups. An
attempt is one set of ranks that train together. It is broken by the end or the failure of a member.
Then all living members join again, and the next attempt consists of them and of the processes that
have joined in the meantime. To grow, the ranks change at the end of a step, without a failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.foundation.failure_file import USELESS_TO_REPEAT

ENDPOINT, PROCESS, NODE = "LATTICE_LAUNCHER", "LATTICE_PROCESS", "LATTICE_NODE"
"""Environment variables of a process: HOST:PORT of the launcher's store, its name, its node."""


@dataclass(frozen=True, kw_only=True)
class ElasticLimits:
    """The numbers of ranks and failures that the user allows."""

    max_ranks: int
    min_ranks: int
    """With fewer ranks the job waits for more."""
    ranks_per_replica: int = 1
    """The number of ranks is a multiple of this."""
    global_batch: int = 0
    """Number of micro batches in a step, which the number of replicas must divide; 0 allows any
    number of replicas."""
    max_same_failures: int = 3
    """This many consecutive failures of the same class, rank and place end the job."""
    start_s: float = 600.0
    """How long the first attempt waits for all ranks."""
    meet_s: float = 30.0
    """How long a process may take to leave its groups before it is killed."""

    def size_for(self, available: int) -> int:
        """Return the number of ranks for this many processes; 0 if there are too few."""
        step = self.ranks_per_replica
        for size in range(min(available, self.max_ranks) // step * step, 0, -step):
            if size >= self.min_ranks and self.global_batch % (size // step) == 0:
                return size
        return 0


@dataclass(frozen=True)
class RankAssignment:
    """The rank of a process in an attempt."""

    process: str
    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    node: int
    attempt: int
    may_grow: bool


@dataclass(frozen=True)
class ProcessExit:
    """The exit status of a process and its failure."""

    text: str
    """The class of its failure, rank, iteration and place; "" if it was killed."""
    status: int

    @property
    def failure_class(self) -> str:
        """The class in FATAL[...]."""
        return self.text.partition("]")[0].removeprefix("FATAL[")


@dataclass
class Decision:
    """The actions of launchers and processes that the coordinator has decided."""

    assigned: list[RankAssignment] = field(default_factory=list)
    broken: int | None = None
    """The attempt that ranks must abandon at once, for `reason`."""
    reason: str = ""
    grows: int | None = None
    """The attempt that ranks must leave after the current step."""
    killed: list[str] = field(default_factory=list)
    status: int | None = None
    """Exit status of a finished job."""


@dataclass
class Coordinator:
    """Collect reports about processes, and decide; `decide` is called periodically."""

    limits: ElasticLimits
    attempt: int = -1
    members: dict[str, int] = field(default_factory=dict)
    """Process -> rank."""
    node_of: dict[str, int] = field(default_factory=dict)
    """Living process -> node."""
    waiting: set[str] = field(default_factory=set)
    is_broken: bool = True
    is_growing: bool = False
    num_failures: int = 0
    """Number of attempts that a failure has broken."""
    _finished: set[str] = field(default_factory=set)
    _since: float = 0.0
    _reason: str = ""
    _status: int | None = None
    _last_exit: str = ""
    _num_same: int = 0
    _is_announced: bool = True

    def has_joined(self, process: str, node: int) -> None:
        """Record that a process is idle."""
        self.node_of[process] = node
        self.waiting.add(process)
        if process in self.members and not self.is_broken:
            self._break("the ranks change" if self.is_growing else f"{process} has left")

    def has_failed(self, attempt: int, process: str) -> None:
        """Record that a member has an error that another rank has caused."""
        if attempt == self.attempt and not self.is_broken:
            self._break(f"{process} has lost a peer")

    def has_ended(self, process: str, exit: ProcessExit) -> None:
        """Record that a process has ended."""
        self.node_of.pop(process, None)
        self.waiting.discard(process)
        if exit.failure_class in USELESS_TO_REPEAT:
            self._status = exit.status
        elif exit.text and exit.failure_class not in ("PEER_LOST", "LAUNCHER_LOST"):
            self._num_same = self._num_same + 1 if exit.text == self._last_exit else 1
            self._last_exit = exit.text
            if self._num_same >= self.limits.max_same_failures:
                self._status = exit.status
        if process not in self.members or self.is_broken:
            return
        if exit.status == 0:
            self._finished.add(process)
            if len(self._finished) == len(self.members):
                self._status = 0
        else:
            self._break(f"rank {self.members[process]} ended with status {exit.status}")

    def _break(self, reason: str) -> None:
        self.is_broken, self._is_announced, self._reason = True, False, reason
        self.num_failures += not self.is_growing
        self._since = 0.0

    def decide(self, now: float) -> Decision:
        """Return the decision at time `now`, in seconds of any clock."""
        decision = Decision(status=self._status)
        if self._status is not None:
            return decision
        if not self._is_announced:
            decision.broken, decision.reason = self.attempt, self._reason
            self._is_announced = True
        if self.is_broken:
            self._since = self._since or now
            self._begin_attempt(now, decision)
        elif not self.is_growing and len(self.members) < self.limits.max_ranks:
            living = len(self.members) + len(self.waiting)
            if self.limits.size_for(living) > len(self.members):
                self.is_growing, decision.grows = True, self.attempt
        return decision

    def _begin_attempt(self, now: float, decision: Decision) -> None:
        """Assign ranks once all living members are idle and there are enough processes.

        Members keep their order, and the ranks of a node are consecutive.
        """
        late = [p for p in self.members if p in self.node_of and p not in self.waiting]
        if late:
            if now - self._since > self.limits.meet_s:
                decision.killed += late
                self._since = now
            return
        size = self.limits.size_for(len(self.waiting))
        waits = self.attempt < 0 and now - self._since < self.limits.start_s
        if size == 0 or (size < self.limits.max_ranks and waits):
            return
        former = self.members

        def order(process: str) -> tuple[bool, int, str]:
            return process not in former, former.get(process, 0), process

        chosen = sorted(self.waiting, key=order)[:size]
        placed = sorted(chosen, key=lambda p: (self.node_of[p], *order(p)))
        self.attempt += 1
        nodes = [self.node_of[process] for process in placed]
        self.members = {process: rank for rank, process in enumerate(placed)}
        for rank, (process, node) in enumerate(zip(placed, nodes, strict=True)):
            decision.assigned.append(
                RankAssignment(
                    process, rank, rank - nodes.index(node), nodes.count(node), size, node,
                    self.attempt, size < self.limits.max_ranks,
                )
            )  # fmt: skip
            self.waiting.discard(process)
        self.is_broken = self.is_growing = False
        self._finished, self._since = set(), 0.0
