"""Prove that a program computes the right thing and finishes.

Pure integers, no torch. `validate` raises a `ScheduleError` that names the step and prints the
grid of all ranks with the failing cell in brackets. What is proved:

1. every (micro batch, chunk) of every rank has exactly one forward, and after it one backward, or
   one input gradient and after that one weight gradient;
2. every step that needs data from another rank has its receive posted, every receive is used,
   every result another rank needs is sent after it was made, every send is freed;
3. on every channel (ordered pair of ranks) the k-th send is the k-th receive;
4. buffers are bounded: unfinished sends and unused receives of a channel stay within the window;
5. gradients of a chunk are released for reduction once, with or after its last backward;
6. the program finishes, with buffered channels and with rendezvous channels that hold nothing.

Programs are deterministic, so whether they finish does not depend on how long steps take: one
walk per channel model is a proof.
"""

from __future__ import annotations

from collections import defaultdict

from megatron.core.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import (
    NO_MICROBATCH,
    Op,
    Program,
    Step,
)
from megatron.core.pipeline_parallel.plot import order_text
from megatron.core.pipeline_parallel.simulate import ChannelModel, Costs, walk

_USER = {Op.RECV_ACTIVATION: Op.FORWARD, Op.RECV_GRADIENT: Op.BACKWARD}
_MAKER = {Op.SEND_ACTIVATION: Op.FORWARD, Op.SEND_GRADIENT: Op.BACKWARD}
_SENT = {Op.FREE_OUTPUT: Op.SEND_ACTIVATION, Op.FREE_GRADIENT: Op.SEND_GRADIENT}


def validate(program: Program, *, rendezvous: bool = True) -> None:
    """Raise `ScheduleError` unless the program is correct and cannot deadlock.

    Args:
        program: as made by `lower`, or by hand.
        rendezvous: also prove it for channels without buffers (the larger part of the time).
    """
    sent: dict[tuple[int, int], list[Step]] = {}
    received: dict[tuple[int, int], list[Step]] = {}
    for rank in range(program.placement.num_ranks):
        checked = _RankCheck(program, rank)
        checked.run()
        sent.update({(rank, target): steps for target, steps in checked.sent.items()})
        received.update({(source, rank): steps for source, steps in checked.received.items()})
    _check_channels(program, sent, received)
    _check_progress(program, ChannelModel.BUFFERED)
    if rendezvous:
        _check_progress(program, ChannelModel.RENDEZVOUS)


class _RankCheck:
    """Static checks of one rank: everything that can be said without running the others."""

    def __init__(self, program: Program, rank: int) -> None:
        placement = program.placement
        chunks = range(placement.num_chunks)
        self.program = program
        self.rank = rank
        self.previous = [placement.previous(rank, chunk) for chunk in chunks]
        self.next = [placement.next(rank, chunk) for chunk in chunks]
        self.done: set[Step] = set()
        self.received: dict[int, list[Step]] = defaultdict(list)
        self.sent: dict[int, list[Step]] = defaultdict(list)
        self.num_unused: dict[int, int] = defaultdict(int)
        self.num_unfinished: dict[int, int] = defaultdict(int)
        # A receiver that follows the sender's order may have to post past the step it needs.
        self.receive_limit = program.prefetch + 1 + program.send_window

    def run(self) -> None:
        backward_left = [0 if self.program.forward_only else self.program.num_microbatches] * len(
            self.next
        )
        released: dict[int, Step] = {}
        for step in self.program.ranks[self.rank]:
            op, microbatch, chunk = step
            if not 0 <= chunk < len(self.next):
                self.fail(step, f"names chunk {chunk}", f"chunks are 0 ... {len(self.next) - 1}")
            if op <= Op.WEIGHT_GRAD:
                self.compute(step)
                backward_left[chunk] -= op is Op.BACKWARD or op is Op.WEIGHT_GRAD
            elif op <= Op.RECV_GRADIENT:
                self.receive(step)
            elif op <= Op.SEND_GRADIENT:
                self.send(step)
            elif op <= Op.FREE_GRADIENT:
                self.free(step)
            elif op is Op.GRAD_SYNC:
                if chunk in released or backward_left[chunk] > (microbatch != NO_MICROBATCH):
                    self.fail(
                        step,
                        "releases gradients too early or twice",
                        "gradients of a chunk are reduced once, with or after its last backward",
                    )
                released[chunk] = step
            if op is not Op.GRAD_SYNC or microbatch == NO_MICROBATCH:
                self.once(step)
        self.complete(released)

    def compute(self, step: Step) -> None:
        """Check order and inputs of an F, B, I or W."""
        op, microbatch, chunk = step
        if not 0 <= microbatch < self.program.num_microbatches:
            self.fail(
                step,
                "names a micro batch that does not exist",
                f"micro batches are 0 ... {self.program.num_microbatches - 1}",
            )
        if op is Op.FORWARD:
            return self.use(step, Op.RECV_ACTIVATION, self.previous[chunk], Op.FORWARD)
        if Step(Op.FORWARD, microbatch, chunk) not in self.done:
            self.fail(step, "comes before its forward", "a backward follows its forward")
        if op is Op.WEIGHT_GRAD:
            if Step(Op.INPUT_GRAD, microbatch, chunk) not in self.done:
                self.fail(
                    step,
                    "comes before its input gradient",
                    "a weight gradient follows the input gradient",
                )
            return None
        other = Op.INPUT_GRAD if op is Op.BACKWARD else Op.BACKWARD
        if Step(other, microbatch, chunk) in self.done:
            self.fail(step, "is the second backward of this micro batch", "one backward each")
        return self.use(step, Op.RECV_GRADIENT, self.next[chunk], op)

    def use(self, step: Step, receive: Op, source: tuple[int, int] | None, maker: Op) -> None:
        """Check that the input of a step is on its way, and take it out of its channel."""
        if source is None:
            return
        _, microbatch, chunk = step
        if source[0] != self.rank:
            if Step(receive, microbatch, chunk) not in self.done:
                self.fail(step, "has no receive before it", "its input comes from another rank")
            self.num_unused[source[0]] -= 1
        else:
            makers = (maker,) if maker is Op.FORWARD else (Op.BACKWARD, Op.INPUT_GRAD)
            if not any(Step(op, microbatch, source[1]) in self.done for op in makers):
                self.fail(
                    step,
                    "comes before the step that makes its input",
                    "stages on one rank hand over in order",
                )

    def receive(self, step: Step) -> None:
        side = self.previous if step.op is Op.RECV_ACTIVATION else self.next
        source = side[step.chunk]
        if source is None or source[0] == self.rank:
            self.fail(step, "has no sender", "only data from another rank are received")
            return
        self.received[source[0]].append(step)
        self.num_unused[source[0]] += 1
        if self.num_unused[source[0]] > self.receive_limit:
            self.fail(
                step,
                f"is receive number {self.num_unused[source[0]]} in the air from rank {source[0]}",
                f"at most {self.receive_limit} may be",
            )

    def send(self, step: Step) -> None:
        op, microbatch, chunk = step
        target = (self.next if op is Op.SEND_ACTIVATION else self.previous)[chunk]
        if target is None or target[0] == self.rank:
            self.fail(step, "has no receiver", "only data for another rank are sent")
            return
        makers = (Op.FORWARD,) if op is Op.SEND_ACTIVATION else (Op.BACKWARD, Op.INPUT_GRAD)
        if not any(Step(maker, microbatch, chunk) in self.done for maker in makers):
            self.fail(step, "comes before the step that makes its data", "data are made, then sent")
        self.sent[target[0]].append(step)
        self.num_unfinished[target[0]] += 1
        if self.num_unfinished[target[0]] > self.program.send_window:
            self.fail(
                step,
                f"is unfinished send number {self.num_unfinished[target[0]]} to rank {target[0]}",
                f"at most {self.program.send_window} may be",
            )

    def free(self, step: Step) -> None:
        op, microbatch, chunk = step
        if Step(_SENT[op], microbatch, chunk) not in self.done:
            self.fail(step, "frees what was not sent", "a buffer is sent, then freed")
        target = (self.next if op is Op.FREE_OUTPUT else self.previous)[chunk]
        assert target is not None
        self.num_unfinished[target[0]] -= 1

    def once(self, step: Step) -> None:
        if step in self.done:
            self.fail(step, "appears twice", "every step is done once")
        self.done.add(step)

    def complete(self, released: dict[int, Step]) -> None:
        """Check that nothing is missing at the end of the program."""
        program = self.program
        for chunk in range(len(self.next)):
            for microbatch in range(program.num_microbatches):
                if Step(Op.FORWARD, microbatch, chunk) not in self.done:
                    self.missing(Step(Op.FORWARD, microbatch, chunk))
                if not program.forward_only and not (
                    Step(Op.BACKWARD, microbatch, chunk) in self.done
                    or Step(Op.WEIGHT_GRAD, microbatch, chunk) in self.done
                ):
                    self.missing(Step(Op.BACKWARD, microbatch, chunk))
            if not program.forward_only and chunk not in released:
                self.missing(Step(Op.GRAD_SYNC, NO_MICROBATCH, chunk))
        for target, count in self.num_unfinished.items():
            if count:
                unfreed = [s for s in self.sent[target] if _freed_by(s) not in self.done]
                self.missing(_freed_by(unfreed[0]))
        for source, count in self.num_unused.items():
            if count:
                rank_text = f"rank {self.rank} receives {count} messages from rank {source}"
                raise ScheduleError(f"{rank_text} that no step uses.", rule="receives are used")

    def missing(self, step: Step) -> None:
        self.fail(step, "is missing", "every chunk does every micro batch forward and backward")

    def fail(self, step: Step, found: str, rule: str) -> None:
        raise _error(self.program, self.rank, step, found, rule)


def _freed_by(sent: Step) -> Step:
    free = Op.FREE_OUTPUT if sent.op is Op.SEND_ACTIVATION else Op.FREE_GRADIENT
    return Step(free, sent.microbatch, sent.chunk)


def _check_channels(
    program: Program,
    sent: dict[tuple[int, int], list[Step]],
    received: dict[tuple[int, int], list[Step]],
) -> None:
    """Check that both ends of every channel agree on what its k-th message is."""
    placement = program.placement
    for source, target in sorted(sent.keys() | received.keys()):
        sends = sent.get((source, target), [])
        receives = received.get((source, target), [])
        for index in range(max(len(sends), len(receives))):
            arriving = None
            if index < len(sends):
                op, microbatch, chunk = sends[index]
                if op is Op.SEND_ACTIVATION:
                    receive, place = Op.RECV_ACTIVATION, placement.next(source, chunk)
                else:
                    receive, place = Op.RECV_GRADIENT, placement.previous(source, chunk)
                assert place is not None
                arriving = Step(receive, microbatch, place[1])
            expected = receives[index] if index < len(receives) else None
            if arriving != expected:
                rank, step = (target, expected) if expected else (source, sends[index])
                text = arriving.label() if arriving else "nothing"
                wanted = expected.label() if expected else "nothing"
                raise _error(
                    program,
                    rank,
                    step,
                    f"is message {index} from rank {source} to rank {target}: the sender gives "
                    f"{text}, the receiver takes {wanted}",
                    "the k-th send of a channel is its k-th receive",
                )


def _check_progress(program: Program, channels: ChannelModel) -> None:
    """Check that no rank waits for ever."""
    blocked = walk(program, Costs(), channels).blocked
    if not blocked:
        return
    waits = [
        f"rank {rank} waits for {wait.label(program.placement.num_chunks)} before "
        f"{program.ranks[rank][position].label(program.placement.num_chunks)}"
        for rank, (position, wait) in sorted(blocked.items())
    ]
    rank = min(blocked)
    position, _ = blocked[rank]
    raise _error(
        program,
        rank,
        program.ranks[rank][position],
        f"never runs with {channels.value} channels: " + "; ".join(waits[:8]),
        "a program finishes on every transport",
        also={r: program.ranks[r][at] for r, (at, _) in blocked.items()},
    )


def _error(
    program: Program,
    rank: int,
    step: Step,
    found: str,
    rule: str,
    also: dict[int, Step] | None = None,
) -> ScheduleError:
    label = step.label(program.placement.num_chunks)
    marked = {rank: step, **(also or {})}
    return ScheduleError(
        f"{program.schedule} program, rank {rank}: {label} {found}.\n"
        + order_text(program, marked),
        rule=rule,
        flags=["--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"],
        fix="choose one of the schedules of megatron.core.pipeline_parallel.orders, or correct the "
        "step in brackets",
    )
