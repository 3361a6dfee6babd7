"""Add communication and bookkeeping to compute-only orders.

Pure integers, no torch. What is added to each rank:

- RECV_*: a posted receive, `prefetch` compute steps ahead of the step that uses it. Receives of
  one channel (an ordered pair of ranks) are posted in the order in which the *sender* sends.
  With two ranks and several chunks a channel carries both activations and gradients, and the
  receiver may need them in another order than they come; following the sender keeps any FIFO
  channel correct, with or without message tags.
- SEND_*: a posted send right after the step that made the data.
- FREE_*: wait for an earlier send and release its buffer: at the latest before the channel would
  hold more than `send_window` unfinished sends, and before the backward of that micro batch
  (whose gradient proves that the receiver has long had the data).
- PARAM_GATHER(chunk): one chunk ahead of the chunk's first forward.
- GRAD_SYNC(chunk): before the chunk's last backward, so that reductions overlap with it; or, with
  `delayed_grad_sync`, after it and `rank` backwards later, so that the ranks of one pipeline start
  their reductions at the same moment.

Every channel joins exactly two ranks in one direction. If sends and receives of both directions
shared one in-order channel, each of two neighbours would wait for the other's send to be received.
"""

from __future__ import annotations

from collections import defaultdict

from megatron.core.pipeline_parallel.instructions import (
    NO_MICROBATCH,
    Op,
    Orders,
    Placement,
    Program,
    Step,
)

_MAKES_GRADIENT = (Op.BACKWARD, Op.INPUT_GRAD)
_ENDS_BACKWARD = (Op.BACKWARD, Op.WEIGHT_GRAD)


def lower(
    orders: Orders,
    *,
    prefetch: int = 1,
    send_window: int | None = None,
    delayed_grad_sync: bool = False,
) -> Program:
    """Turn compute-only orders into the full program of all ranks.

    Args:
        orders: what each rank computes, in order.
        prefetch: compute steps between posting a receive and using it; 0 posts at the last moment.
        send_window: unfinished sends a rank may have on one channel; by default what the order
            needs to run without stalls.
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
    """Return the full program of one rank; reads the orders of this rank and its neighbours only."""
    placement = orders.placement
    compute = orders[rank]
    receives = _PostedReceives(orders, rank)
    sends = _OpenSends(orders.send_window if send_window is None else send_window)
    before, after = _sync_points(compute, rank, placement, delayed_grad_sync)

    program: list[Step] = []
    for index, step in enumerate(compute):
        op, microbatch, chunk = step
        program.extend(before[index])
        # Everything needed up to `prefetch` steps from now is posted; earlier steps did the rest.
        for ahead in range(index + prefetch if index else 0, index + prefetch + 1):
            if ahead < len(compute):
                program.extend(receives.post_for(compute[ahead]))
        if op in _MAKES_GRADIENT:
            program.extend(sends.free_output_of(microbatch, chunk))
        program.append(step)
        if op is Op.FORWARD:
            target = placement.next(rank, chunk)
            if target is not None and target[0] != rank:
                program.extend(sends.send(target[0], Step(Op.SEND_ACTIVATION, microbatch, chunk)))
        elif op in _MAKES_GRADIENT:
            target = placement.previous(rank, chunk)
            if target is not None and target[0] != rank:
                program.extend(sends.send(target[0], Step(Op.SEND_GRADIENT, microbatch, chunk)))
        program.extend(after[index])
    program.extend(sends.free_all())
    return tuple(program)


class _PostedReceives:
    """Emits receives on demand, in the order in which each neighbour sends them."""

    def __init__(self, orders: Orders, rank: int) -> None:
        self._rank = rank
        self._placement = orders.placement
        self._waiting: dict[int, list[Step]] = {}
        for source in _senders_to(rank, orders.placement):
            queue = _receives_in_sending_order(orders, source, rank)
            queue.reverse()
            self._waiting[source] = queue
        self._posted: set[Step] = set()

    def post_for(self, step: Step) -> list[Step]:
        """Return the receives still to be posted before `step` may run."""
        op, microbatch, chunk = step
        if op is Op.FORWARD:
            source = self._placement.previous(self._rank, chunk)
            needed = Step(Op.RECV_ACTIVATION, microbatch, chunk)
        elif op is Op.WEIGHT_GRAD:
            return []
        else:
            source = self._placement.next(self._rank, chunk)
            needed = Step(Op.RECV_GRADIENT, microbatch, chunk)
        if source is None or source[0] == self._rank or needed in self._posted:
            return []
        emitted = []
        waiting = self._waiting[source[0]]
        while waiting:
            receive = waiting.pop()
            self._posted.add(receive)
            emitted.append(receive)
            if receive == needed:
                break
        return emitted


class _OpenSends:
    """Keeps each channel's unfinished sends within the window."""

    _FREE = {Op.SEND_ACTIVATION: Op.FREE_OUTPUT, Op.SEND_GRADIENT: Op.FREE_GRADIENT}

    def __init__(self, window: int) -> None:
        self._window = window
        self._open: dict[int, list[Step]] = defaultdict(list)

    def send(self, target: int, step: Step) -> list[Step]:
        """Return the frees that make room, then the send."""
        channel = self._open[target]
        emitted = []
        while len(channel) >= self._window:
            emitted.append(self._free(channel.pop(0)))
        channel.append(step)
        emitted.append(step)
        return emitted

    def free_output_of(self, microbatch: int, chunk: int) -> list[Step]:
        sent = Step(Op.SEND_ACTIVATION, microbatch, chunk)
        for channel in self._open.values():
            if sent in channel:
                channel.remove(sent)
                return [self._free(sent)]
        return []

    def free_all(self) -> list[Step]:
        return [self._free(step) for channel in self._open.values() for step in channel]

    def _free(self, step: Step) -> Step:
        return Step(self._FREE[step.op], step.microbatch, step.chunk)


def _senders_to(rank: int, placement: Placement) -> set[int]:
    neighbours = set()
    for chunk in range(placement.num_chunks):
        for other in (placement.previous(rank, chunk), placement.next(rank, chunk)):
            if other is not None and other[0] != rank:
                neighbours.add(other[0])
    return neighbours


def _receives_in_sending_order(orders: Orders, source: int, rank: int) -> list[Step]:
    """Return what `rank` must receive from `source`, in the order `source` produces it."""
    placement = orders.placement
    following = [placement.next(source, c) for c in range(placement.num_chunks)]
    preceding = [placement.previous(source, c) for c in range(placement.num_chunks)]
    receives = []
    for op, microbatch, chunk in orders[source]:
        if op is Op.FORWARD:
            target, receive = following[chunk], Op.RECV_ACTIVATION
        elif op in _MAKES_GRADIENT:
            target, receive = preceding[chunk], Op.RECV_GRADIENT
        else:
            continue
        if target is not None and target[0] == rank:
            receives.append(Step(receive, microbatch, target[1]))
    return receives


def _sync_points(
    compute: tuple[Step, ...], rank: int, placement: Placement, delayed: bool
) -> tuple[dict[int, list[Step]], dict[int, list[Step]]]:
    """Return the bookkeeping steps to emit before and after each compute step, by index."""
    before: dict[int, list[Step]] = defaultdict(list)
    after: dict[int, list[Step]] = defaultdict(list)
    first_forward: dict[int, int] = {}
    last_backward: dict[int, int] = {}
    backwards = []
    for index, (op, _, chunk) in enumerate(compute):
        if op is Op.FORWARD:
            first_forward.setdefault(chunk, index)
        elif op in _ENDS_BACKWARD:
            last_backward[chunk] = len(backwards)
            backwards.append(index)

    by_first_use = sorted(first_forward, key=first_forward.__getitem__)
    for position, chunk in enumerate(by_first_use):
        use = 0 if position == 0 else first_forward[by_first_use[position - 1]]
        before[use].append(Step(Op.PARAM_GATHER, NO_MICROBATCH, chunk))
    for chunk, ordinal in last_backward.items():
        if delayed:
            late = min(ordinal + rank, len(backwards) - 1)
            after[backwards[late]].append(Step(Op.GRAD_SYNC, NO_MICROBATCH, chunk))
        else:
            index = backwards[ordinal]
            before[index].append(Step(Op.GRAD_SYNC, compute[index].microbatch, chunk))
    return before, after
