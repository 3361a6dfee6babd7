"""Add communication and bookkeeping to compute-only orders.

Pure integers, no torch. Each rank gets these steps:

- RECV_*: post a receive, `prefetch` compute steps before the step that uses it. The receives of one
  channel (an ordered pair of ranks) are posted in the order of the *sender's* sends. With two ranks
  and several chunks a channel has both activations and gradients, and the receiver may use them in
  another order. The sender's order is correct for any FIFO channel, with or without message tags.
- SEND_*: post a send directly after the step that made the data.
- FREE_*: wait for an earlier send and release its buffer, at the latest before the channel would
  hold more than `send_window` unfinished sends, and before the backward of the micro batch (its
  gradient proves that the receiver has the data).
- OVERLAP_F_B: before the two steps of a pair. The results of both are sent when both have ended,
  and the receives of both are posted before the first. A proof for the two steps in sequence (both
  waits, then both sends) therefore holds for any interleaving.
- PARAM_GATHER(chunk): one chunk before the chunk's first forward.
- GRAD_SYNC(chunk): before the chunk's last backward, so that reductions overlap with it; or, with
  `delayed_grad_sync`, `rank` backwards after it, so that all ranks of a pipeline start their
  reductions at the same moment.

A channel connects two ranks in one direction. If the sends and receives of both directions shared
an in-order channel, two neighbours would each wait for the other to receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from megatron.core.pipeline_parallel.instructions import (
    BACKWARD,
    FORWARD,
    FREE_GRADIENT,
    FREE_OUTPUT,
    GRAD_SYNC,
    INPUT_GRAD,
    NO_MICROBATCH,
    OVERLAP_F_B,
    PARAM_GATHER,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WEIGHT_GRAD,
    Orders,
    Program,
    Step,
)


def lower(
    orders: Orders,
    *,
    prefetch: int = 1,
    send_window: int | None = None,
    delayed_grad_sync: bool = False,
) -> Program:
    """Turn compute-only orders into the full program of all ranks.

    Args:
        orders: compute steps of each rank, in order.
        prefetch: compute steps between the post of a receive and its use; 0 posts it directly
            before its use.
        send_window: largest number of unfinished sends on one channel; default
            `orders.send_window`.
        delayed_grad_sync: place GRAD_SYNC after, instead of before, a chunk's last backward.
    """
    send_window = orders.send_window if send_window is None else send_window
    ranks = tuple(
        lower_rank(
            orders,
            rank,
            prefetch=prefetch,
            send_window=send_window,
            delayed_grad_sync=delayed_grad_sync,
        )
        for rank in range(len(orders))
    )
    return Program(
        schedule=orders.schedule,
        placement=orders.placement,
        num_microbatches=orders.num_microbatches,
        forward_only=orders.forward_only,
        ranks=ranks,
        prefetch=prefetch,
        send_window=send_window,
    )


def lower_rank(
    orders: Orders,
    rank: int,
    *,
    prefetch: int = 1,
    send_window: int | None = None,
    delayed_grad_sync: bool = False,
) -> tuple[Step, ...]:
    """Return the full program of one rank, from its own order and the orders of its neighbours."""
    placement = orders.placement
    chunks = range(placement.num_chunks)
    compute = orders[rank]
    receives = _Receives(orders, rank)
    sends = _Sends(orders.send_window if send_window is None else send_window)
    next_rank = [_rank_elsewhere(placement.next(rank, chunk), rank) for chunk in chunks]
    previous_rank = [_rank_elsewhere(placement.previous(rank, chunk), rank) for chunk in chunks]
    before, after = _sync_points(compute, rank, delayed_grad_sync)

    program: list[Step] = []
    for ahead in range(min(prefetch, len(compute))):
        receives.post_for(compute[ahead], program)
    for together in _units(len(compute), () if orders.pairs is None else orders.pairs(rank)):
        for index in together:
            op, microbatch, chunk = compute[index]
            program.extend(before.get(index, ()))
            if index + prefetch < len(compute):
                receives.post_for(compute[index + prefetch], program)
            above = next_rank[chunk]
            if above is not None and (op is BACKWARD or op is INPUT_GRAD):
                sends.free_output(above, microbatch, chunk, program)
        if len(together) > 1:
            program.append(Step(OVERLAP_F_B, NO_MICROBATCH, 0))
        program.extend(compute[index] for index in together)
        for index in together:
            op, microbatch, chunk = compute[index]
            above, below = next_rank[chunk], previous_rank[chunk]
            if op is FORWARD and above is not None:
                sends.send(above, Step(SEND_ACTIVATION, microbatch, chunk), program)
            elif (op is BACKWARD or op is INPUT_GRAD) and below is not None:
                sends.send(below, Step(SEND_GRADIENT, microbatch, chunk), program)
            program.extend(after.get(index, ()))
    sends.free_all(program)
    return tuple(program)


def _units(num_steps: int, pairs: Collection[int]) -> Iterator[range]:
    """Yield the indices of single steps and of pairs, in order."""
    index = 0
    while index < num_steps:
        length = 2 if index in pairs else 1
        yield range(index, index + length)
        index += length


def _rank_elsewhere(location: tuple[int, int] | None, rank: int) -> int | None:
    """Return the rank of a location, None without a location or if it is `rank` itself."""
    return None if location is None or location[0] == rank else location[0]


class _Receives:
    """Posts receives when they are needed, in the order of each neighbour's sends."""

    def __init__(self, orders: Orders, rank: int) -> None:
        placement = orders.placement
        chunks = range(placement.num_chunks)
        before = [_rank_elsewhere(placement.previous(rank, chunk), rank) for chunk in chunks]
        after = [_rank_elsewhere(placement.next(rank, chunk), rank) for chunk in chunks]
        sources = {source for source in (*before, *after) if source is not None}
        queues = {source: _receives_in_sending_order(orders, source, rank) for source in sources}
        for queue in queues.values():
            queue.reverse()
        nothing: list[Step] = []
        self._activations = [nothing if s is None else queues[s] for s in before]
        self._gradients = [nothing if s is None else queues[s] for s in after]
        self._posted: set[Step] = set()

    def post_for(self, step: Step, program: list[Step]) -> None:
        """Append the missing receives up to the input of `step`."""
        op, microbatch, chunk = step
        if op is FORWARD:
            waiting, receive = self._activations[chunk], RECV_ACTIVATION
        elif op is WEIGHT_GRAD:
            return
        else:
            waiting, receive = self._gradients[chunk], RECV_GRADIENT
        if not waiting:
            return
        needed = (receive, microbatch, chunk)
        if needed in self._posted:
            return
        while waiting:
            posted = waiting.pop()
            program.append(posted)
            if posted == needed:
                return
            self._posted.add(posted)


class _Sends:
    """Keeps each channel's unfinished sends within the window."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._open: dict[int, list[Step]] = defaultdict(list)

    def send(self, target: int, step: Step, program: list[Step]) -> None:
        """Append the frees that keep the channel within the window, then the send."""
        unfinished = self._open[target]
        while len(unfinished) >= self._window:
            program.append(_free(unfinished.pop(0)))
        unfinished.append(step)
        program.append(step)

    def free_output(self, target: int, microbatch: int, chunk: int, program: list[Step]) -> None:
        """Append the free of an output, if its send is unfinished."""
        unfinished = self._open[target]
        sent = (SEND_ACTIVATION, microbatch, chunk)
        if sent in unfinished:
            index = unfinished.index(Step(*sent))
            program.append(_free(unfinished.pop(index)))

    def free_all(self, program: list[Step]) -> None:
        """Append the frees of all unfinished sends."""
        program.extend(_free(step) for steps in self._open.values() for step in steps)


def _free(sent: Step) -> Step:
    op = FREE_OUTPUT if sent.op is SEND_ACTIVATION else FREE_GRADIENT
    return Step(op, sent.microbatch, sent.chunk)


def _receives_in_sending_order(orders: Orders, source: int, rank: int) -> list[Step]:
    """Return the receives of `rank` from `source`, in the order of the sends of `source`."""
    placement = orders.placement
    following = [placement.next(source, c) for c in range(placement.num_chunks)]
    preceding = [placement.previous(source, c) for c in range(placement.num_chunks)]
    receives = []
    for op, microbatch, chunk in orders[source]:
        if op is FORWARD:
            target, receive = following[chunk], RECV_ACTIVATION
        elif op is WEIGHT_GRAD:
            continue
        else:
            target, receive = preceding[chunk], RECV_GRADIENT
        if target is not None and target[0] == rank:
            receives.append(Step(receive, microbatch, target[1]))
    return receives


def _sync_points(
    compute: tuple[Step, ...], rank: int, delayed: bool
) -> tuple[dict[int, list[Step]], dict[int, list[Step]]]:
    """Return the PARAM_GATHER and GRAD_SYNC steps before and after each compute step, by index."""
    before: dict[int, list[Step]] = defaultdict(list)
    after: dict[int, list[Step]] = defaultdict(list)
    first_forward: dict[int, int] = {}
    last_backward: dict[int, int] = {}
    backwards: list[int] = []
    for index, (op, _, chunk) in enumerate(compute):
        if op is FORWARD:
            first_forward.setdefault(chunk, index)
        elif op is BACKWARD or op is WEIGHT_GRAD:
            last_backward[chunk] = len(backwards)
            backwards.append(index)

    by_first_use = sorted(first_forward, key=first_forward.__getitem__)
    for position, chunk in enumerate(by_first_use):
        use = 0 if position == 0 else first_forward[by_first_use[position - 1]]
        before[use].append(Step(PARAM_GATHER, NO_MICROBATCH, chunk))
    for chunk, ordinal in last_backward.items():
        index = backwards[ordinal]
        if delayed or compute[index].op is WEIGHT_GRAD:
            late = min(ordinal + (rank if delayed else 0), len(backwards) - 1)
            after[backwards[late]].append(Step(GRAD_SYNC, NO_MICROBATCH, chunk))
        else:
            before[index].append(Step(GRAD_SYNC, compute[index].microbatch, chunk))
    return before, after
