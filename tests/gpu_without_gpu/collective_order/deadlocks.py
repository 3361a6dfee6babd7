"""Orders in which ranks would wait for each other for ever, though each group agrees.

On a GPU every communicator has a stream. An operation starts when the one before it in that stream
has ended, and all that the computing stream had waited for when it was started; it ends when all
its ranks have started it. The first operation of a communicator connects it, and the host itself
waits there for the other ranks.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.gpu_without_gpu.collective_order.calls import Call, RankLog, Wait

Communicator = tuple[str, tuple[int, ...]]


@dataclass
class _Launch:
    """Calls that one rank starts as one: a collective, a message, or a batch of messages."""

    calls: list[Call]
    keys: list[Hashable]
    """Of each call: the same where it meets a call of another rank."""
    num_waits: int
    """What the computing stream had waited for before: so many of the rank's waits."""

    members: frozenset[int]
    """The ranks that connect: those of the group, or the two ends of a message by itself."""

    @property
    def stream(self) -> Hashable:
        """The communicator, each of which has a stream."""
        return (self.calls[0].communicator, self.members)


@dataclass
class _Rank:
    rank: int
    program: deque[_Launch]
    waits: list[_Launch]
    queues: dict[Hashable, deque[_Launch]] = field(default_factory=lambda: defaultdict(deque))
    num_waits_done: int = 0


def find_stuck(logs: Sequence[RankLog]) -> list[str]:
    """Run the calls of all ranks by the rules above; say where they stand if that does not end."""
    ranks = [_program_of(log) for log in logs]
    connected: dict[Hashable, set[int]] = defaultdict(set)
    arrived: dict[Hashable, int] = defaultdict(int)  # ranks that have begun an operation
    begun: set[int] = set()
    while True:
        moved = False
        for rank in ranks:
            moved |= _issue(rank, connected)
            for queue in rank.queues.values():
                while queue and queue[0].num_waits <= rank.num_waits_done:
                    launch = queue[0]
                    if id(launch) not in begun:
                        begun.add(id(launch))
                        moved = True
                        for key in launch.keys:
                            arrived[key] += 1
                    if not _has_ended(launch, arrived):
                        break
                    queue.popleft()
                    moved = True
            while rank.num_waits_done < len(rank.waits) and _has_ended(
                rank.waits[rank.num_waits_done], arrived
            ):
                rank.num_waits_done += 1
                moved = True
        if not moved:
            break
    lines = [line for rank in ranks for line in _standing(rank)]
    return ["ranks wait for each other for ever:\n" + "\n".join(lines)] if lines else []


def _issue(rank: _Rank, connected: dict[Hashable, set[int]]) -> bool:
    """Let the host start what it can."""
    moved = False
    while rank.program:
        launch = rank.program[0]
        here = connected[launch.stream]
        if rank.rank not in here:
            here.add(rank.rank)
            moved = True
        if len(here) < len(launch.members):
            return moved
        rank.queues[launch.stream].append(rank.program.popleft())
        moved = True
    return moved


def _has_ended(launch: _Launch, arrived: dict[Hashable, int]) -> bool:
    return all(
        arrived[key] == (2 if call.is_message else len(call.ranks))
        for call, key in zip(launch.calls, launch.keys, strict=True)
    )


def _standing(rank: _Rank) -> Iterator[str]:
    if rank.program:
        yield f"  rank {rank.rank} connects for {rank.program[0].calls[0]}"
    for queue in rank.queues.values():
        if queue:
            yield f"  rank {rank.rank} is at {queue[0].calls[0]}"


def _program_of(log: RankLog) -> _Rank:
    counts: dict[Hashable, int] = defaultdict(int)
    launches: list[_Launch] = []
    by_number: list[_Launch] = []
    waits: list[_Launch] = []
    for event in log.events:
        if isinstance(event, Wait):
            waits.append(by_number[event.number])
            continue
        ends: tuple[int, ...] = ()
        if event.is_message:
            ends = (log.rank, event.peer) if event.name == "send" else (event.peer, log.rank)
        channel = (event.communicator, ends)
        key = (channel, counts[channel])
        counts[channel] += 1
        if event.batch >= 0 and launches and launches[-1].calls[0].batch == event.batch:
            launches[-1].calls.append(event)
            launches[-1].keys.append(key)
        else:
            is_pair = event.is_message and event.batch < 0
            members = frozenset(ends if is_pair else event.ranks)
            launches.append(_Launch([event], [key], len(waits), members))
        by_number.append(launches[-1])
    return _Rank(log.rank, deque(launches), waits)


def find_launch_cycle(logs: Sequence[RankLog]) -> list[str]:
    """Return a circle of collectives that ranks start in different orders, if there is one.

    Nothing says that a device has space for two kernels of NCCL at a time: where one rank starts
    group A before B and another B before A, each may wait for the other. Messages of a pipeline
    are meant to overlap, and have no part in it.
    """
    following: dict[Hashable, dict[Hashable, tuple[int, Call, Call]]] = defaultdict(dict)
    num_before: dict[Hashable, int] = defaultdict(int)
    for log in logs:
        counts: dict[Communicator, int] = defaultdict(int)
        before: tuple[Hashable, Call] | None = None
        for call in log.calls:
            if call.is_message:
                continue
            node = (call.communicator, counts[call.communicator])
            counts[call.communicator] += 1
            if before is not None and node not in following[before[0]]:
                following[before[0]][node] = (log.rank, before[1], call)
                num_before[node] += 1
            before = (node, call)
    free = [node for node in list(following) if not num_before[node]]
    left = {node: dict(after) for node, after in following.items() if after}
    while free:
        for node in left.pop(free.pop(), {}):
            num_before[node] -= 1
            if not num_before[node]:
                free.append(node)
    if not left:
        return []
    lines = []
    for rank, first, second in _circle(left):
        lines.append(f"  rank {rank} starts {first}\n    before {second}")
    return ["collectives are started in a circle:\n" + "\n".join(lines)]


def _circle(
    following: dict[Hashable, dict[Hashable, tuple[int, Call, Call]]],
) -> list[tuple[int, Call, Call]]:
    """Return the edges of one circle of a graph in which every node has one before it or after."""
    # A node that still waits for another one has a predecessor among those that are left.
    before = {after: node for node, many in following.items() for after in many}
    node = next(n for n in before if n in following)
    places: dict[Hashable, int] = {}
    path: list[Hashable] = []
    while node not in places:
        places[node] = len(path)
        path.append(node)
        node = before[node]
    circle = [*reversed(path[places[node] :])]
    ends = [*circle[1:], circle[0]]
    return [following[a][b] for a, b in zip(circle, ends, strict=True)]
