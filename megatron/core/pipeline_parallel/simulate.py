"""Run a program on a clock instead of on devices.

Pure integers and caller-chosen costs, no torch. `walk` is the one interpreter of programs besides
the executor: with buffered channels it gives the makespan, the bubble and the timeline that
`plot.py` draws; with rendezvous channels it is the deadlock proof that `validate.py` uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron.core.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import (
    COMPUTE_OPS,
    Op,
    Program,
    Step,
)


class ChannelModel(Enum):
    """When a posted send counts as finished."""

    BUFFERED = "buffered"
    """At once: the channel holds any number of messages."""

    RENDEZVOUS = "rendezvous"
    """When the receive of the same position in the same channel is posted too, and all earlier
    transfers of the channel are over. Nothing is ever buffered: the strictest transport."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations in any one unit.

    Attributes:
        forward, backward: of one chunk and one micro batch.
        input_grad, weight_grad: the two halves of a split backward; default half of `backward`.
        transfer: time from post to arrival of one message.
        stage_scale: factor on the compute of each of the p*v stages; empty means all 1.
    """

    forward: float = 1.0
    backward: float = 2.0
    input_grad: float | None = None
    weight_grad: float | None = None
    transfer: float = 0.0
    stage_scale: Sequence[float] = ()

    def of(self, op: Op, stage: int) -> float:
        """Return the duration of a compute step on a stage."""
        if op is Op.FORWARD:
            cost = self.forward
        elif op is Op.BACKWARD:
            cost = self.backward
        elif op is Op.INPUT_GRAD:
            cost = self.backward / 2 if self.input_grad is None else self.input_grad
        else:
            cost = self.backward / 2 if self.weight_grad is None else self.weight_grad
        return cost * self.stage_scale[stage] if self.stage_scale else cost


class Span(NamedTuple):
    """One compute step with its time, planned or measured."""

    rank: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Walk:
    """What came of walking a program.

    Attributes:
        spans: compute steps in order of each rank's program, ranks one after the other.
        blocked: for each rank that could not finish, (index into its program, what it waits for).
    """

    spans: list[Span]
    blocked: dict[int, tuple[int, Step]]


@dataclass(frozen=True)
class Report:
    """Result of a simulation, in the unit of the costs.

    Attributes:
        makespan: time from the first step to the end of the last one.
        busy: compute time of each rank.
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


def simulate(program: Program, costs: Costs | None = None, **cost_fields: float) -> Report:
    """Time a program with buffered channels.

    Args:
        program: as made by `lower`.
        costs: durations; or give its fields as keywords: `simulate(program, forward=1.0)`.
    Raises:
        ScheduleError: the program deadlocks.
    """
    walked = walk(program, costs or Costs(**cost_fields))
    if walked.blocked:
        ranks = ", ".join(str(rank) for rank in sorted(walked.blocked))
        raise ScheduleError(
            f"the {program.schedule} program deadlocks: ranks {ranks} wait forever.",
            rule="a program must finish before it can be timed",
            fix="call validate(program), which shows the step that is stuck",
        )
    return report(walked.spans, program.placement.num_ranks, peak_live_activations(program))


def report(spans: list[Span], num_ranks: int, peak: list[int]) -> Report:
    """Summarise a timeline, planned or measured, of `num_ranks` ranks."""
    busy = [0.0] * num_ranks
    for span in spans:
        busy[span.rank] += span.end - span.start
    start = min((span.start for span in spans), default=0.0)
    makespan = max((span.end for span in spans), default=0.0) - start
    idle = num_ranks * makespan - sum(busy)
    bubble = idle / (num_ranks * makespan) if makespan else 0.0
    return Report(makespan, busy, bubble, peak, spans)


def peak_live_activations(program: Program) -> list[int]:
    """Return, per rank, the most (micro batch, chunk) pairs held for a backward at one time."""
    if program.forward_only:
        return [1] * program.placement.num_ranks
    peaks = []
    for steps in program.ranks:
        live = peak = 0
        for op, _, _ in steps:
            if op is Op.FORWARD:
                live += 1
                peak = max(peak, live)
            elif op is Op.BACKWARD or op is Op.WEIGHT_GRAD:
                live -= 1
        peaks.append(peak)
    return peaks


def walk(program: Program, costs: Costs, channels: ChannelModel = ChannelModel.BUFFERED) -> Walk:
    """Interpret a program on all ranks until each is finished or blocked for good.

    A rank blocks only where the executor does: a compute step waits for its input, FREE_* waits
    for its send. Costs must not be negative.
    """
    return _Walker(program, costs, channels).run()


class _Channel:
    """Sends and receives of one ordered pair of ranks, matched by position."""

    __slots__ = ("clock", "num_finished", "receives", "sends")

    def __init__(self) -> None:
        self.sends: list[tuple[float, Step, Step]] = []  # posted at, sender's free, receiver's recv
        self.receives: list[float] = []  # posted at
        self.num_finished = 0
        self.clock = 0.0


class _Walker:
    def __init__(self, program: Program, costs: Costs, channels: ChannelModel) -> None:
        placement = program.placement
        ranks, chunks = range(placement.num_ranks), range(placement.num_chunks)
        self.program = program
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
        # Per rank: when the data of a RECV_* are there, and when a FREE_* may pass.
        self.ready: list[dict[Step, float]] = [{} for _ in ranks]
        self.channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.clock = [0.0] * placement.num_ranks
        self.position = [0] * placement.num_ranks
        self.waits_for: list[Step | None] = [None] * placement.num_ranks
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.runnable = list(ranks)

    def run(self) -> Walk:
        while self.runnable:
            self._run_rank(self.runnable.pop())
        blocked = {
            rank: (self.position[rank], wait)
            for rank, wait in enumerate(self.waits_for)
            if wait is not None
        }
        return Walk([span for spans in self.spans for span in spans], blocked)

    def _run_rank(self, rank: int) -> None:
        """Advance one rank until its program ends or it must wait."""
        steps = self.program.ranks[rank]
        ready, spans = self.ready[rank], self.spans[rank]
        durations = self.durations[rank]
        clock = self.clock[rank]
        for position in range(self.position[rank], len(steps)):
            step = steps[position]
            op, microbatch, chunk = step
            if op <= Op.WEIGHT_GRAD:
                needed = self._input_of(rank, step)
                if needed is not None:
                    arrived = ready.pop(needed, None)
                    if arrived is None:
                        return self._block(rank, position, clock, needed)
                    clock = max(clock, arrived)
                start = clock
                clock = start + durations[op][chunk]
                spans.append(Span(rank, step, start, clock))
                self._pass_on_locally(rank, step, clock)
            elif op <= Op.RECV_GRADIENT:
                if self.rendezvous:
                    self._post_receive(rank, step, clock)
            elif op <= Op.SEND_GRADIENT:
                self._post_send(rank, step, clock)
            elif op <= Op.FREE_GRADIENT and self.rendezvous:
                finished = ready.pop(step, None)
                if finished is None:
                    return self._block(rank, position, clock, step)
                clock = max(clock, finished)
        self.clock[rank] = clock
        self.position[rank] = len(steps)
        self.waits_for[rank] = None

    def _block(self, rank: int, position: int, clock: float, step: Step) -> None:
        self.clock[rank] = clock
        self.position[rank] = position
        self.waits_for[rank] = step

    def _input_of(self, rank: int, step: Step) -> Step | None:
        """Return the receive (or local hand-over) that a compute step depends on."""
        op, microbatch, chunk = step
        if op is Op.FORWARD:
            if self.previous[rank][chunk] is None:
                return None
            return Step(Op.RECV_ACTIVATION, microbatch, chunk)
        if op is Op.WEIGHT_GRAD or self.next[rank][chunk] is None:
            return None
        return Step(Op.RECV_GRADIENT, microbatch, chunk)

    def _pass_on_locally(self, rank: int, step: Step, now: float) -> None:
        """Make the result of a step available to a neighbouring stage on the same rank."""
        op, microbatch, chunk = step
        if op is Op.WEIGHT_GRAD:
            return
        forward = op is Op.FORWARD
        target = (self.next if forward else self.previous)[rank][chunk]
        if target is not None and target[0] == rank:
            receive = Op.RECV_ACTIVATION if forward else Op.RECV_GRADIENT
            self.ready[rank][Step(receive, microbatch, target[1])] = now

    def _post_send(self, rank: int, step: Step, now: float) -> None:
        op, microbatch, chunk = step
        if op is Op.SEND_ACTIVATION:
            target, receive, free = self.next[rank][chunk], Op.RECV_ACTIVATION, Op.FREE_OUTPUT
        else:
            target, receive, free = self.previous[rank][chunk], Op.RECV_GRADIENT, Op.FREE_GRADIENT
        assert target is not None, f"rank {rank} sends {step.label()} to nobody"
        arrival = Step(receive, microbatch, target[1])
        if self.rendezvous:
            channel = self.channels[rank, target[0]]
            channel.sends.append((now, Step(free, microbatch, chunk), arrival))
            self._transfer(rank, target[0], channel)
        else:
            self._announce(target[0], arrival, now + self.transfer)

    def _post_receive(self, rank: int, step: Step, now: float) -> None:
        side = self.previous if step.op is Op.RECV_ACTIVATION else self.next
        source = side[rank][step.chunk]
        assert source is not None, f"rank {rank} receives {step.label()} from nobody"
        channel = self.channels[source[0], rank]
        channel.receives.append(now)
        self._transfer(source[0], rank, channel)

    def _transfer(self, source: int, target: int, channel: _Channel) -> None:
        """Finish every transfer of which both sides are posted."""
        while channel.num_finished < min(len(channel.sends), len(channel.receives)):
            sent, free, arrival = channel.sends[channel.num_finished]
            received = channel.receives[channel.num_finished]
            channel.clock = max(sent, received, channel.clock) + self.transfer
            channel.num_finished += 1
            self._announce(target, arrival, channel.clock)
            self._announce(source, free, channel.clock)

    def _announce(self, rank: int, event: Step, when: float) -> None:
        self.ready[rank][event] = when
        if self.waits_for[rank] == event:
            self.waits_for[rank] = None
            self.runnable.append(rank)
