"""Find the ranks that block the others, and the reason. The functions read no clock or process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from megatron.core.foundation.flight_recorder import Channel, Field
from megatron.resilience.recorder_reader import Operation, Snapshot, show_instruction

_SAME_SIZE = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
"""Operations with the same number of elements on all ranks of a group."""
_PATIENCE = 4
_LONG_WAIT_S = 5.0
"""The shortest wait for another machine that causes a warning."""


@dataclass(frozen=True)
class RankView:
    """The state of one rank, as the watchdog has read it."""

    rank: int
    snapshot: Snapshot
    letter: str = "S"
    """State of the process: T is stopped, t in a debugger, X has ended without a report."""
    quiet_s: float = 0.0
    """Time since the last progress of the training thread."""
    beatless_s: float = 0.0
    """Time since the last heartbeat, which another thread counts."""
    stopped_s: float = 0.0
    longest_s: float = 0.0
    """The longest time without progress of the training thread in training so far."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.letter in "Tt"

    @property
    def is_in_training(self) -> bool:
        """Whether the rank trains and has completed a step, so that durations are regular."""
        fields = self.snapshot.fields
        return bool(fields[Field.IS_TRAINING] and fields[Field.NUM_STEPS])

    def is_locked(self, timeout_s: float) -> bool:
        """Return whether a thread has held the GIL for the timeout."""
        is_late = min(self.beatless_s, self.quiet_s) >= timeout_s
        return is_late and not self.is_stopped and self.is_in_training

    def holds_up(self, timeout_s: float) -> bool:
        """Return whether a rank for which others wait is late enough for a warning.

        A first step, a save or an evaluation may take `_PATIENCE` times as long.
        """
        usual = self.is_in_training and self.snapshot.activity != "evaluating"
        is_stuck = not self.snapshot.waits or self.beatless_s >= timeout_s
        is_late = self.quiet_s >= (timeout_s if usual else _PATIENCE * timeout_s)
        return is_stuck and is_late and not self.is_stopped


@dataclass(frozen=True)
class StuckRanks:
    """The ranks that block the job, and the reason."""

    kind: str
    """HANG, COLLECTIVE_MISMATCH, DEADLOCK or PEER_LOST end the job; WAITING is a warning."""
    ranks: tuple[int, ...]
    """The ranks that are the cause; for a mismatch both sides."""
    text: str
    waiting: tuple[str, ...] = ()
    """One line for each waiting rank, which names the ranks for which it waits."""

    @property
    def ends_job(self) -> bool:
        """Whether the ranks cannot continue."""
        return self.kind != "WAITING"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The states of all ranks of a machine at one time, and the conclusions from them."""

    views: Mapping[int, RankView]
    """By global rank."""
    timeout_s: float
    instructions: Mapping[int, str]
    """Number of an instruction of the schedule -> name."""
    sees_all: bool
    """Whether `views` contains all ranks of the job."""
    restarts: bool = False
    """Whether another part replaces ranks that have ended."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Global rank -> host, for messages."""

    def find(self) -> StuckRanks | None:
        """Return the ranks that block the others, or None."""
        found = self.mismatch()
        if any(view.letter == "X" for view in self.views.values()):
            return found or self._lost()
        if found is None:
            found = self._stopped_or_locked()
        if found is None and self.sees_all:
            found = self._deadlock()
        if found is None:
            found = self._slow()
        if found is None and not self.sees_all:
            found = self._slow_link()
        return found

    def describe(self, rank: int) -> str:
        """Describe the activity, step and operation of a rank, in words."""
        shot = self.views[rank].snapshot
        parts = [shot.activity or "starting", f"iteration {shot.fields[Field.ITERATION]}"]
        if during := show_instruction(shot.fields[Field.INSTRUCTION], self.instructions):
            parts.append(during)
        if shot.waits_in is not None:
            parts.append(f"waits in {self._show(shot.waits_in)}")
        if shot.blocked_on is not None:
            parts.append(f"waits for rank {shot.blocked_on}")
        if not shot.waits and shot.operations:
            parts.append(f"after {self._show(shot.operations[max(shot.operations)])}")
        return ", ".join(parts)

    def mismatch(self) -> StuckRanks | None:
        """Return two ranks whose operations in one channel do not match, with both operations."""
        found = None
        for one, two in combinations(self.views.values(), 2):
            pair = _first_pair(one.snapshot, two.snapshot, _do_not_match)
            if pair is not None and (found is None or pair[0].count < found[0]):
                found = (pair[0].count, one.rank, pair[0], two.rank, pair[1])
        if found is None:
            return None
        _, first, mine, second, theirs = found
        text = f"rank {first} is in {self._show(mine)}; rank {second} is in {self._show(theirs)}"
        return StuckRanks("COLLECTIVE_MISMATCH", (first, second), text)

    def _lost(self) -> StuckRanks | None:
        """Return the ranks that have ended without a report, if the others make no progress.

        With gloo the lost connections end the others at once; NCCL waits for its own timeout.
        """
        living = [view for view in self.views.values() if view.letter != "X"]
        if self.restarts or any(view.quiet_s < self.timeout_s for view in living):
            return None
        ranks = tuple(view.rank for view in self.views.values() if view.letter == "X")
        text = "; ".join(f"rank {r} has ended without a report: {self.describe(r)}" for r in ranks)
        return StuckRanks("PEER_LOST", ranks, text, self._waiting_chain(ranks))

    def _show(self, operation: Operation) -> str:
        return operation.describe(self.instructions)

    def _stopped_or_locked(self) -> StuckRanks | None:
        views = self.views.values()
        stuck = [v for v in views if v.letter == "T" and v.stopped_s >= self.timeout_s]
        why = "is stopped (SIGSTOP)"
        if not stuck or all(v.is_stopped for v in views):
            stuck = [v for v in views if v.is_locked(self.timeout_s)]
            why = "runs, but its other threads cannot acquire Python's interpreter lock"
        if not stuck:
            return None
        ranks = tuple(v.rank for v in stuck)
        text = "; ".join(f"rank {rank} {why}: {self.describe(rank)}" for rank in ranks)
        return StuckRanks("HANG", ranks, text, self._waiting_chain(ranks))

    def _awaited(self, view: RankView) -> list[int]:
        """Return the ranks that have not entered the operation that blocks a rank.

        A rank that has entered a later operation of the channel has completed its part of this one.
        """
        operation, peer = view.snapshot.waits_in, view.snapshot.blocked_on
        if peer is not None:
            is_ahead = (
                operation is not None
                and peer in self.views
                and operation.count < self._count(peer, operation.channel)
            )
            return [] if is_ahead else [peer]
        if operation is None:
            return []
        ranks = operation.channel.ends() or operation.channel.ranks
        return [
            rank
            for rank in ranks
            if rank != view.rank and self._count(rank, operation.channel) < operation.count
        ]

    def _count(self, rank: int, channel: Channel) -> float:
        """Return how many operations of a channel a rank has entered; infinity if it is unknown."""
        view = self.views.get(rank)
        return float("inf") if view is None else view.snapshot.count(channel)

    def _waiting_chain(self, stuck: Sequence[int] = ()) -> tuple[str, ...]:
        """Return a line for each waiting rank, which names the ranks for which it waits.

        Args:
            stuck: ranks that no longer run. If all ranks have entered the operation that blocks a
                rank, the rank waits for the stuck ranks of the operation.
        """
        lines = []
        for view in self.views.values():
            if not view.snapshot.waits or view.is_stopped or view.rank in stuck:
                continue
            operation, targets = view.snapshot.waits_in, self._awaited(view)
            if not targets and operation is not None:
                targets = [rank for rank in stuck if rank in operation.channel.ranks]
            where = "" if operation is None else f" in {self._show(operation)}"
            ranks = f" for rank {', '.join(map(str, targets))}" if targets else ""
            lines.append(f"rank {view.rank} waits{where}{ranks}")
        return tuple(lines)

    def _deadlock(self) -> StuckRanks | None:
        """Return a cycle of ranks that wait for each other.

        If a rank has no recent heartbeat, return None: a thread of this rank may hold the GIL,
        which is diagnosed after the timeout.
        """
        views = self.views.values()
        if not all(view.snapshot.waits and view.quiet_s >= self.timeout_s for view in views):
            return None
        if any(view.beatless_s >= self.timeout_s / 2 for view in views):
            return None
        cycle = _cycle({view.rank: self._awaited(view) for view in views})
        if not cycle:
            return None
        sides = "; ".join(f"rank {rank}: {self.describe(rank)}" for rank in cycle)
        differing = self._first_difference(cycle)
        text = f"ranks {list(cycle)} wait for each other in a cycle: {sides}{differing}"
        return StuckRanks("DEADLOCK", cycle, text, self._waiting_chain())

    def _first_difference(self, ranks: Sequence[int]) -> str:
        """Return the first operation that two ranks have entered in different instructions.

        One of the two ranks has skipped an earlier operation.
        """
        for one, two in combinations((self.views[rank] for rank in ranks), 2):
            pair = _first_pair(
                one.snapshot, two.snapshot, lambda a, b: a.instruction != b.instruction
            )
            if pair is not None:
                return (
                    f"; they first differ at rank {one.rank}: {self._show(pair[0])}, "
                    f"rank {two.rank}: {self._show(pair[1])}"
                )
        return ""

    def _slow_link(self) -> StuckRanks | None:
        """Return ranks of other machines for which a rank waits much longer than ever before."""
        for view in self.views.values():
            operation = view.snapshot.waits_in
            is_late = view.quiet_s >= max(_LONG_WAIT_S, _PATIENCE * view.longest_s)
            if operation is None or not is_late or not view.is_in_training:
                continue
            remote = tuple(rank for rank in operation.channel.ranks if rank not in self.views)
            if not remote or self._awaited(view):
                continue
            hosts = self.hosts
            shown = ", ".join(f"{r} ({hosts[r]})" if r in hosts else str(r) for r in remote[:8])
            more = f" and {len(remote) - 8} more" if remote[8:] else ""
            text = (
                f"rank {view.rank} has waited {view.quiet_s:.0f} s in {self._show(operation)} "
                f"for ranks on other machines: {shown}{more}. The longest wait so far was "
                f"{view.longest_s:.1f} s: one of these ranks or the link to it is slow or down"
            )
            return StuckRanks("WAITING", remote, text)
        return None

    def _slow(self) -> StuckRanks | None:
        """Return the ranks that compute while others have waited for the timeout."""
        late = sorted(
            {
                rank
                for view in self.views.values()
                if view.snapshot.waits and view.quiet_s >= self.timeout_s
                for rank in self._awaited(view)
                if rank in self.views and self.views[rank].holds_up(self.timeout_s)
            }
        )
        if not late:
            return None
        text = "; ".join(
            f"rank {r} has made no progress for {self.views[r].quiet_s:.0f} s: {self.describe(r)}"
            for r in late
        )
        return StuckRanks("WAITING", tuple(late), text, self._waiting_chain())


def _do_not_match(mine: Operation, theirs: Operation) -> bool:
    """Return whether two operations cannot belong to the same collective."""
    is_size = mine.name in _SAME_SIZE and mine.num_elements != theirs.num_elements
    return is_size or mine.name != theirs.name


def _first_pair(
    one: Snapshot, two: Snapshot, differ: Callable[[Operation, Operation], bool]
) -> tuple[Operation, Operation] | None:
    """Return the first operations of two ranks in the same collective that differ."""
    pairs = []
    for channel, operations in one.of_channel.items():
        if channel.tag >= 0 and (theirs := two.of_channel.get(channel)):
            for count, mine in operations.items():
                other = theirs.get(count)
                if other is not None and differ(mine, other):
                    pairs.append((mine, other))
                    break
    return min(pairs, default=None, key=lambda pair: pair[0].number)


def _cycle(edges: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks of a cycle, () without one."""
    for start in edges:
        path, rank = [start], start
        while edges.get(rank):
            rank = edges[rank][0]
            if rank in path:
                return tuple(path[path.index(rank) :])
            path.append(rank)
    return ()
