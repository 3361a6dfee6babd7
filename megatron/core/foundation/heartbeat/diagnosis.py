"""From where all ranks are to who holds up the others, and why. Pure: no clock, no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from megatron.core.foundation.heartbeat.layout import SAME_SIZE, Word
from megatron.core.foundation.heartbeat.reading import Channel, Notes, Record, show_instruction

_PATIENCE = 4
_LONG_WAIT_S = 5.0
"""A shorter wait for another machine is no warning, whatever is usual."""


@dataclass(frozen=True)
class RankView:
    """One rank as it is seen from outside."""

    rank: int
    notes: Notes
    letter: str = "S"
    """State of the process: T is stopped, t a debugger's, X has ended without a word."""
    quiet_s: float = 0.0
    """Since when its training thread has not gone on."""
    beatless_s: float = 0.0
    """Since when its other threads have not run."""
    stopped_s: float = 0.0
    longest_s: float = 0.0
    """The longest time in training that the training thread has waited and then gone on."""


@dataclass(frozen=True)
class Finding:
    """Why nothing goes on."""

    kind: str
    """HANG, COLLECTIVE_MISMATCH or DEADLOCK end the job; WAITING is a warning."""
    ranks: tuple[int, ...]
    """Who is the cause, or both sides."""
    text: str
    waiting: tuple[str, ...] = ()
    """Who waits for whom."""

    @property
    def ends_job(self) -> bool:
        """Whether it cannot get better."""
        return self.kind != "WAITING"


def diagnose(
    views: Sequence[RankView],
    timeout_s: float,
    instructions: Mapping[int, str],
    *,
    sees_all: bool,
    hosts: Mapping[int, str] | None = None,
) -> Finding | None:
    """Return what holds up the ranks, or None.

    Args:
        timeout_s: how long nothing may happen.
        sees_all: whether `views` are all ranks of the job.
        hosts: global rank -> host, for messages.
    """
    found = mismatch(views, instructions)
    if any(view.letter == "X" for view in views):
        return found  # the others hear of it by themselves
    if found is None:
        found = _stopped_or_locked(views, timeout_s, instructions)
    if found is None and sees_all:
        found = _deadlock(views, timeout_s, instructions)
    if found is None:
        found = _slow(views, timeout_s, instructions)
    if found is None and not sees_all:
        found = _slow_link(views, instructions, hosts or {})
    return found


def describe_place(view: RankView, instructions: Mapping[int, str]) -> str:
    """Return where a rank is, in words."""
    notes = view.notes
    parts = [notes.activity or "starting", f"iteration {notes.word(Word.ITERATION)}"]
    if during := show_instruction(notes.word(Word.INSTRUCTION), instructions):
        parts.append(during)
    waits_in, peer = notes.waits_in, notes.blocked_on
    if waits_in is not None:
        parts.append(f"waits in {waits_in.describe(instructions)}")
    if peer is not None:
        parts.append(f"waits for rank {peer}")
    if not notes.waits and notes.records:
        parts.append(f"after {notes.records[max(notes.records)].describe(instructions)}")
    return ", ".join(parts)


def mismatch(views: Sequence[RankView], instructions: Mapping[int, str]) -> Finding | None:
    """Return two ranks whose operations of one channel are not the same, with both sides."""
    found = None
    for one, two in combinations(views, 2):
        pair = _first_pair(one.notes, two.notes, _do_not_match)
        if pair is not None and (found is None or pair[0].count < found[0]):
            found = (pair[0].count, one.rank, pair[0], two.rank, pair[1])
    if found is None:
        return None
    _, first, mine, second, theirs = found
    return Finding(
        "COLLECTIVE_MISMATCH",
        (first, second),
        f"rank {first} is in {mine.describe(instructions)}; "
        f"rank {second} is in {theirs.describe(instructions)}",
    )


def _do_not_match(mine: Record, theirs: Record) -> bool:
    """Return whether a collective cannot be both operations."""
    is_size = mine.operation in SAME_SIZE and mine.num_elements != theirs.num_elements
    return is_size or mine.operation != theirs.operation


def _first_pair(
    one: Notes, two: Notes, differ: Callable[[Record, Record], bool]
) -> tuple[Record, Record] | None:
    """Return the first operation of a rank that differs from another's of the same collective."""
    pairs = []
    for channel, records in one.of_channel.items():
        if channel.tag >= 0 and (theirs := two.of_channel.get(channel)):
            for count, mine in records.items():
                other = theirs.get(count)
                if other is not None and differ(mine, other):
                    pairs.append((mine, other))
                    break
    return min(pairs, default=None, key=lambda pair: pair[0].number)


def _stopped_or_locked(
    views: Sequence[RankView], timeout_s: float, instructions: Mapping[int, str]
) -> Finding | None:
    stopped = [v for v in views if v.letter == "T" and v.stopped_s >= timeout_s]
    if stopped and not all(v.letter in "Tt" for v in views):
        why = "is stopped (SIGSTOP)"
    else:
        stopped = [v for v in views if _is_locked(v, timeout_s)]
        why = "runs, but no other thread of it gets Python's interpreter lock"
    if not stopped:
        return None
    text = "; ".join(f"rank {v.rank} {why}: {describe_place(v, instructions)}" for v in stopped)
    ranks = tuple(v.rank for v in stopped)
    return Finding("HANG", ranks, text, waiting_chain(views, instructions, ranks))


def _is_locked(view: RankView, timeout_s: float) -> bool:
    return (
        view.letter not in "Tt"
        and view.beatless_s >= timeout_s
        and view.quiet_s >= timeout_s
        and _is_in_training(view)
    )


def _is_in_training(view: RankView) -> bool:
    """Return whether it does what takes about as long each time, and has done it before."""
    notes = view.notes
    return bool(notes.word(Word.IS_TRAINING) and notes.word(Word.NUM_STEPS))


def awaited(view: RankView, others: Mapping[int, RankView]) -> list[int]:
    """Return the ranks without which the operation that a rank waits in cannot end.

    A rank that has entered a later operation of the channel has done its part of this one.
    """
    record, peer = view.notes.waits_in, view.notes.blocked_on
    if peer is not None:
        is_ahead = (
            record is not None
            and peer in others
            and record.count < _count(others[peer], record.channel)
        )
        return [] if is_ahead else [peer]
    if record is None:
        return []
    ends = record.channel.ends()
    if ends is not None:
        peer = ends[0] if ends[0] != view.rank else ends[1]
        return [peer] if _count(others.get(peer), record.channel) < record.count else []
    return [
        rank
        for rank in record.channel.ranks
        if rank != view.rank and _count(others.get(rank), record.channel) < record.count
    ]


def _count(view: RankView | None, channel: Channel) -> float:
    """Return how many operations of a channel a rank has entered; of an unknown one enough."""
    return float("inf") if view is None else view.notes.count(channel)


def waiting_chain(
    views: Sequence[RankView], instructions: Mapping[int, str], stuck: Sequence[int] = ()
) -> tuple[str, ...]:
    """Return who waits for whom.

    Args:
        stuck: ranks that do nothing any more; who waits in an operation that all have entered
            waits for these.
    """
    others = {view.rank: view for view in views}
    lines = []
    for view in views:
        if view.notes.waits and view.letter not in "Tt" and view.rank not in stuck:
            record = view.notes.waits_in
            targets = awaited(view, others)
            if not targets and record is not None:
                targets = [rank for rank in stuck if rank in record.channel.ranks]
            ranks = ", ".join(map(str, targets))
            where = "" if record is None else f" in {record.describe(instructions)}"
            lines.append(f"rank {view.rank} waits{where}" + (f" for rank {ranks}" if ranks else ""))
    return tuple(lines)


def _deadlock(
    views: Sequence[RankView], timeout_s: float, instructions: Mapping[int, str]
) -> Finding | None:
    """Return a cycle of ranks that wait for each other.

    A rank whose heart has not beaten lately may be about to be found locked: it is no proof.
    """
    others = {view.rank: view for view in views}
    if not all(view.notes.waits and view.quiet_s >= timeout_s for view in views):
        return None
    if any(view.beatless_s >= timeout_s / 2 for view in views):
        return None
    edges = {view.rank: awaited(view, others) for view in views}
    cycle = _cycle(edges)
    if not cycle:
        return None
    sides = "; ".join(
        f"rank {rank}: {describe_place(others[rank], instructions)}" for rank in cycle
    )
    differing = _first_difference([others[rank] for rank in cycle], instructions)
    text = f"ranks {list(cycle)} wait for each other in a circle: {sides}{differing}"
    return Finding("DEADLOCK", cycle, text, waiting_chain(views, instructions))


def _first_difference(views: Sequence[RankView], instructions: Mapping[int, str]) -> str:
    """Return where the ranks first did not do the same, which tells of an operation left out."""
    for one, two in combinations(views, 2):
        pair = _first_pair(one.notes, two.notes, lambda a, b: a.instruction != b.instruction)
        if pair is not None:
            return (
                f"; they part at rank {one.rank}: {pair[0].describe(instructions)}, "
                f"rank {two.rank}: {pair[1].describe(instructions)}"
            )
    return ""


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


def _holds_up(view: RankView, timeout_s: float) -> bool:
    """Return whether a rank on which others wait is late enough for a warning.

    A first step, a save or an evaluation may take long: it has `_PATIENCE` times as long.
    """
    usual = _is_in_training(view) and view.notes.activity != "evaluating"
    patience_s = timeout_s if usual else _PATIENCE * timeout_s
    is_stuck = not view.notes.waits or view.beatless_s >= timeout_s
    return is_stuck and view.letter not in "Tt" and view.quiet_s >= patience_s


def _slow_link(
    views: Sequence[RankView], instructions: Mapping[int, str], hosts: Mapping[int, str]
) -> Finding | None:
    """Return a rank that waits far longer than ever before for ranks of other machines."""
    others = {view.rank: view for view in views}
    for view in views:
        record = view.notes.waits_in
        is_late = view.quiet_s >= max(_LONG_WAIT_S, _PATIENCE * view.longest_s)
        if record is None or not is_late or not _is_in_training(view):
            continue
        remote = tuple(rank for rank in record.channel.ranks if rank not in others)
        if not remote or awaited(view, others):
            continue
        shown = ", ".join(f"{r} ({hosts[r]})" if r in hosts else str(r) for r in remote[:8])
        more = f" and {len(remote) - 8} more" if remote[8:] else ""
        text = (
            f"rank {view.rank} has waited {view.quiet_s:.0f} s in {record.describe(instructions)} "
            f"for ranks on other machines: {shown}{more}. The longest wait so far was "
            f"{view.longest_s:.1f} s: one of these ranks or the link to it is slow or down"
        )
        return Finding("WAITING", remote, text)
    return None


def _slow(
    views: Sequence[RankView], timeout_s: float, instructions: Mapping[int, str]
) -> Finding | None:
    """Return who computes while others have waited for long."""
    others = {view.rank: view for view in views}
    late = sorted(
        {
            rank
            for view in views
            if view.notes.waits and view.quiet_s >= timeout_s
            for rank in awaited(view, others)
            if rank in others and _holds_up(others[rank], timeout_s)
        }
    )
    if not late:
        return None
    text = "; ".join(
        f"rank {r} has not gone on for {others[r].quiet_s:.0f} s: "
        f"{describe_place(others[r], instructions)}"
        for r in late
    )
    return Finding("WAITING", tuple(late), text, waiting_chain(views, instructions))
