"""Compare what ranks have started: the same collectives in each group, and matching messages."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from tests.gpu_without_gpu.collective_order.calls import Call, RankLog
from tests.gpu_without_gpu.collective_order.deadlocks import find_launch_cycle, find_stuck

Communicator = tuple[str, tuple[int, ...]]


def problems_of(logs: Sequence[RankLog]) -> list[str]:
    """Return what NCCL would hang or fail on, or read as something else; nothing is good.

    Args:
        logs: of all ranks of the job.
    """
    found = [*_different_collectives(logs), *_unmatched_messages(logs)]
    # Of ranks that start different things, no order can be followed to its end.
    return found or find_stuck(logs) or find_launch_cycle(logs)


def _different_collectives(logs: Sequence[RankLog]) -> list[str]:
    """Return the first disagreement of each group."""
    lists: dict[Communicator, dict[int, list[Call]]] = defaultdict(dict)
    for log in logs:
        for call in log.calls:
            if not call.is_message:
                by_rank = lists[call.communicator]
                for rank in call.ranks:
                    by_rank.setdefault(rank, [])
                by_rank[log.rank].append(call)
    found = []
    for by_rank in lists.values():
        for number, calls in enumerate(zip_longest(*by_rank.values())):
            if not _agree(calls):
                lines = [
                    f"  rank {r}: {c or 'nothing'}" for r, c in zip(by_rank, calls, strict=True)
                ]
                found.append(f"collective {number} of a group differs:\n" + "\n".join(lines))
                break
    return found


def _agree(calls: Sequence[Call | None]) -> bool:
    first = calls[0]
    if first is None or any(call is None or call.agreed != first.agreed for call in calls):
        return False
    present = [call for call in calls if call is not None]
    if first.name != "all_to_all_single":
        return True
    return all(
        sender.sizes[0][to] == receiver.sizes[1][source]
        for source, sender in enumerate(present)
        for to, receiver in enumerate(present)
    )


def _unmatched_messages(logs: Sequence[RankLog]) -> list[str]:
    """Return the first send and receive of each channel that do not fit."""
    sent: dict[tuple[Communicator, int, int], list[Call]] = defaultdict(list)
    received: dict[tuple[Communicator, int, int], list[Call]] = defaultdict(list)
    for log in logs:
        for call in log.calls:
            if call.name == "send":
                sent[call.communicator, log.rank, call.peer].append(call)
            elif call.name == "recv":
                received[call.communicator, call.peer, log.rank].append(call)
    found = []
    for key in sent.keys() | received.keys():
        _, source, target = key
        for number, (s, r) in enumerate(zip_longest(sent[key], received[key])):
            if s is None or r is None or (s.shape, s.dtype) != (r.shape, r.dtype):
                found.append(
                    f"message {number} from rank {source} to rank {target} does not fit:\n"
                    f"  rank {source}: {s or 'no send'}\n  rank {target}: {r or 'no receive'}"
                )
                break
    return found
