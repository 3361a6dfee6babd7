"""Simulate a program with given durations of its steps.

Pure integers and costs from the caller, no torch. `walk` interprets a program: with buffered
channels it computes the makespan, the bubble and the spans that `timeline.py` draws; with
rendezvous channels it proves for `validate.py` that the program does not deadlock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import (
    BACKWARD,
    COMPUTE_OPS,
    FORWARD,
    FREE_GRADIENT,
    FREE_OUTPUT,
    INPUT_GRAD,
    OVERLAP_F_B,
    RECV_ACTIVATION,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WEIGHT_GRAD,
    Op,
    Program,
    Step,
)


class ChannelModel(Enum):
    """When a posted send counts as finished."""

    BUFFERED = "buffered"
    """Immediately: the channel holds any number of messages."""

    RENDEZVOUS = "rendezvous"
    """When the receive at the same position of the channel is posted and all earlier transfers of
    the channel have finished. The channel holds no message: the strictest transport."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations, all in the same unit.

    Attributes:
        forward, backward: of one chunk and one micro batch.
        input_grad, weight_grad: of the two halves of a split backward; default half of `backward`.
        pair: of a forward and a backward that overlap; default their sum. It is shorter if one
            computes while the other communicates.
        transfer: time between the post and the arrival of one message.
        stage_scale: factor on the compute of each of the p*v stages; default 1 for all stages.
    """

    forward: float = 1.0
    backward: float = 2.0
    input_grad: float | None = None
    weight_grad: float | None = None
    pair: float | None = None
    transfer: float = 0.0
    stage_scale: Sequence[float] = ()

    def of(self, op: Op, stage: int) -> float:
        """Return the duration of a compute step on a stage."""
        if op is FORWARD:
            cost = self.forward
        elif op is BACKWARD:
            cost = self.backward
        elif op is INPUT_GRAD:
            cost = self.backward / 2 if self.input_grad is None else self.input_grad
        else:
            cost = self.backward / 2 if self.weight_grad is None else self.weight_grad
        return cost * self.stage_scale[stage] if self.stage_scale else cost

    @property
    def share_in_pair(self) -> float:
        """Return the duration of a forward or backward in a pair, relative to its own duration."""
        return 1.0 if self.pair is None else self.pair / (self.forward + self.backward)


class Span(NamedTuple):
    """One compute step with its start and end, planned or measured."""

    rank: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Walk:
    """Result of walking a program.

    Attributes:
        spans: compute steps in the order of each rank's program, rank after rank.
        blocked: rank that cannot finish -> (index into its program, step that it waits for).
    """

    spans: list[Span]
    blocked: dict[int, tuple[int, Step]]


@dataclass(frozen=True)
class Report:
    """Result of a simulation, in the unit of the costs.

    Attributes:
        makespan: time from the first step to the end of the last one.
        busy: compute time of each rank; the overlap of measured steps is counted once.
        bubble: idle share of all ranks together over the makespan, 0 ... 1.
        peak_live_activations: per rank, the largest number of (micro batch, chunk) pairs whose
            forward is done and whose backward is not.
        spans: the timeline.
    """

    makespan: float
    busy: list[float]
    bubble: float
    peak_live_activations: list[int]
    spans: list[Span]


def simulate(program: Program, costs: Costs | None = None, **cost_fields: Any) -> Report:
    """Time a program with buffered channels.

    Args:
        program: as made by `lower`.
        costs: durations. Its fields may be given as keywords: `simulate(program, forward=1.0)`.
    Raises:
        ScheduleError: the program deadlocks.
    """
    walked = walk(program, costs or Costs(**cost_fields))
    if walked.blocked:
        ranks = ", ".join(str(rank) for rank in sorted(walked.blocked))
        raise ScheduleError(
            f"the {program.schedule} program deadlocks: ranks {ranks} wait forever.",
            rule="a program must finish before it can be timed",
            fix="call validate(program), which shows the step that blocks",
        )
    return report(walked.spans, program.placement.num_ranks)


def report(spans: list[Span], num_ranks: int) -> Report:
    """Summarise a timeline, planned or measured, of `num_ranks` ranks."""
    busy, end = [0.0] * num_ranks, [-math.inf] * num_ranks
    live, peak = [0] * num_ranks, [0] * num_ranks
    trains = any(span.step.op is not FORWARD for span in spans)
    for rank, (op, _, _), start, stop in sorted(spans, key=lambda span: span.start):
        if stop > end[rank]:
            busy[rank] += stop - max(start, end[rank])
            end[rank] = stop
        if op is FORWARD:
            live[rank] = live[rank] + 1 if trains else 1
            peak[rank] = max(peak[rank], live[rank])
        elif op is not INPUT_GRAD:
            live[rank] -= 1
    start = min((span.start for span in spans), default=0.0)
    makespan = max((span.end for span in spans), default=0.0) - start
    idle = num_ranks * makespan - sum(busy)
    bubble = idle / (num_ranks * makespan) if makespan else 0.0
    return Report(makespan, busy, bubble, peak, spans)


def walk(program: Program, costs: Costs, channels: ChannelModel = ChannelModel.BUFFERED) -> Walk:
    """Interpret a program on all ranks until each rank has finished or is blocked forever.

    A rank blocks at the same steps as in the executor: a compute step waits for its input, FREE_*
    waits for its send. Costs must not be negative.
    """
    return _Walker(program, costs, channels).run()


class _Channel:
    """Sends and receives of one ordered pair of ranks, matched by position."""

    __slots__ = ("clock", "num_finished", "receives", "sends")

    def __init__(self) -> None:
        self.sends: list[tuple[float, int, int]] = []  # posted at, sender's free, receiver's item
        self.receives: list[float] = []  # posted at
        self.num_finished = 0
        self.clock = 0.0


# A rank waits for an item of one of these kinds. The item of kind k, micro batch i and chunk c is
# the integer (i*v + c)*4 + k, because a large program has 100,000 items.
_KINDS = (RECV_ACTIVATION, RECV_GRADIENT, FREE_OUTPUT, FREE_GRADIENT)
_ACTIVATION, _GRADIENT, _OUTPUT_FREE, _GRADIENT_FREE = range(4)


class _Walker:
    def __init__(self, program: Program, costs: Costs, channels: ChannelModel) -> None:
        placement = program.placement
        ranks, chunks = range(placement.num_ranks), range(placement.num_chunks)
        self.program = program
        self.num_chunks = placement.num_chunks
        self.rendezvous = channels is ChannelModel.RENDEZVOUS
        self.transfer = costs.transfer
        self.previous = [[placement.previous(rank, chunk) for chunk in chunks] for rank in ranks]
        self.next = [[placement.next(rank, chunk) for chunk in chunks] for rank in ranks]
        self.durations = [
            {
                op: [costs.of(op, placement.stage(rank, chunk)) for chunk in chunks]
                for op in COMPUTE_OPS
            }
            for rank in ranks
        ]
        self.share_in_pair = costs.share_in_pair
        self.in_pairs: list[set[int]] = [
            set() if costs.pair is None else _positions_in_pairs(steps) for steps in program.ranks
        ]
        self.ready: list[dict[int, float]] = [{} for _ in ranks]  # item -> since when
        self.channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.clock = [0.0] * placement.num_ranks
        self.position = [0] * placement.num_ranks
        self.waits_for = [_NOTHING] * placement.num_ranks
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.runnable = list(ranks)

    def run(self) -> Walk:
        while self.runnable:
            self.run_rank(self.runnable.pop())
        blocked = {
            rank: (self.position[rank], self.step_of(item))
            for rank, item in enumerate(self.waits_for)
            if item != _NOTHING
        }
        return Walk([span for spans in self.spans for span in spans], blocked)

    def run_rank(self, rank: int) -> None:
        """Advance one rank until its program ends or it must wait."""
        steps = self.program.ranks[rank]
        ready, spans, durations = self.ready[rank], self.spans[rank], self.durations[rank]
        in_pairs = self.in_pairs[rank]
        previous, following = self.previous[rank], self.next[rank]
        clock = self.clock[rank]
        for position in range(self.position[rank], len(steps)):
            step = steps[position]
            op, microbatch, chunk = step
            if op <= WEIGHT_GRAD:
                needed = self.input_of(rank, step)
                if needed != _NOTHING:
                    if needed not in ready:
                        return self.block(rank, position, clock, needed)
                    clock = max(clock, ready.pop(needed))
                start = clock
                duration = durations[op][chunk]
                if position in in_pairs:
                    duration *= self.share_in_pair
                clock = start + duration
                spans.append(Span(rank, step, start, clock))
                if op is not WEIGHT_GRAD:
                    self.pass_on(rank, step, clock)
            elif op <= RECV_GRADIENT:
                if self.rendezvous:
                    source = (previous if op is RECV_ACTIVATION else following)[chunk]
                    assert source is not None, f"rank {rank} receives {step.label()} from nobody"
                    channel = self.channels[source[0], rank]
                    channel.receives.append(clock)
                    self.match(source[0], rank, channel)
            elif op <= SEND_GRADIENT:
                self.send(rank, step, clock)
            elif op <= FREE_GRADIENT and self.rendezvous:
                item = (microbatch * self.num_chunks + chunk) * 4
                item += _OUTPUT_FREE if op is FREE_OUTPUT else _GRADIENT_FREE
                if item not in ready:
                    return self.block(rank, position, clock, item)
                clock = max(clock, ready.pop(item))
            elif op is OVERLAP_F_B:
                for half in steps[position + 1 : position + 3]:
                    needed = self.input_of(rank, half)
                    if needed != _NOTHING:
                        if needed not in ready:
                            return self.block(rank, position, clock, needed)
                        clock = max(clock, ready[needed])
        self.block(rank, len(steps), clock, _NOTHING)

    def input_of(self, rank: int, step: Step) -> int:
        """Return the item that a compute step waits for."""
        op, microbatch, chunk = step
        source = (self.previous if op is FORWARD else self.next)[rank][chunk]
        if op is WEIGHT_GRAD or source is None:
            return _NOTHING
        kind = _ACTIVATION if op is FORWARD else _GRADIENT
        return (microbatch * self.num_chunks + chunk) * 4 + kind

    def block(self, rank: int, position: int, clock: float, item: int) -> None:
        self.clock[rank] = clock
        self.position[rank] = position
        self.waits_for[rank] = item

    def pass_on(self, rank: int, step: Step, now: float) -> None:
        """Make the result of a step available to a neighbouring stage on the same rank."""
        op, microbatch, chunk = step
        forward = op is FORWARD
        target = (self.next if forward else self.previous)[rank][chunk]
        if target is not None and target[0] == rank:
            kind = _ACTIVATION if forward else _GRADIENT
            self.ready[rank][(microbatch * self.num_chunks + target[1]) * 4 + kind] = now

    def send(self, rank: int, step: Step, now: float) -> None:
        op, microbatch, chunk = step
        if op is SEND_ACTIVATION:
            target, kind, free = self.next[rank][chunk], _ACTIVATION, _OUTPUT_FREE
        else:
            target, kind, free = self.previous[rank][chunk], _GRADIENT, _GRADIENT_FREE
        assert target is not None, f"rank {rank} sends {step.label()} to nobody"
        arrival = (microbatch * self.num_chunks + target[1]) * 4 + kind
        if self.rendezvous:
            channel = self.channels[rank, target[0]]
            free += (microbatch * self.num_chunks + chunk) * 4
            channel.sends.append((now, free, arrival))
            self.match(rank, target[0], channel)
        else:
            self.announce(target[0], arrival, now + self.transfer)

    def match(self, source: int, target: int, channel: _Channel) -> None:
        """Finish every transfer whose send and receive are posted."""
        while channel.num_finished < min(len(channel.sends), len(channel.receives)):
            sent, free, arrival = channel.sends[channel.num_finished]
            received = channel.receives[channel.num_finished]
            channel.clock = max(sent, received, channel.clock) + self.transfer
            channel.num_finished += 1
            self.announce(target, arrival, channel.clock)
            self.announce(source, free, channel.clock)

    def announce(self, rank: int, item: int, when: float) -> None:
        self.ready[rank][item] = when
        if self.waits_for[rank] == item:
            self.waits_for[rank] = _NOTHING
            self.runnable.append(rank)

    def step_of(self, item: int) -> Step:
        place, kind = divmod(item, 4)
        return Step(_KINDS[kind], *divmod(place, self.num_chunks))


def _positions_in_pairs(steps: Sequence[Step]) -> set[int]:
    """Return the positions of the steps of all pairs in a program."""
    starts = [position for position, step in enumerate(steps) if step.op is OVERLAP_F_B]
    return {start + steps for start in starts for steps in (1, 2)}


_NOTHING = -1
