"""Prove that a program computes the right thing and finishes.

Pure integers, no torch. `validate` raises a `ScheduleError` that names the step and prints the
grid of all ranks with the failing cell in brackets. What is proved:

1. every (micro batch, chunk) of every rank has exactly one forward, and after it one backward, or
   one input gradient and after that one weight gradient;
2. every step that needs data from another rank has its receive posted; every receive is used;
   every result that another rank needs is sent after its compute step; every send is freed;
3. on every channel (ordered pair of ranks) the k-th send is the k-th receive;
4. buffers are bounded: unfinished sends and unused receives of a channel stay within the window;
5. gradients of a chunk are released for reduction once, with or after its last backward;
6. every overlapped pair is a forward and the whole backward of another micro batch or chunk;
7. the program finishes, with buffered channels and with rendezvous channels that hold nothing.

Programs are deterministic: whether they finish does not depend on the durations of steps, so one
walk per channel model is a proof. A program that finishes with rendezvous channels also finishes
with buffered ones.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import (
    BACKWARD,
    FORWARD,
    FREE_GRADIENT,
    FREE_OUTPUT,
    GRAD_SYNC,
    INPUT_GRAD,
    NO_MICROBATCH,
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
from megatron.core.pipeline_parallel.simulate import ChannelModel, Costs, Walk, walk

Location = tuple[int, int]
Crossing = tuple[bool, int, int]  # is a gradient, micro batch, chunk on the receiving rank


def validate(program: Program, *, rendezvous: bool = True) -> Walk:
    """Raise `ScheduleError` unless the program is correct and cannot deadlock.

    Args:
        program: as made by `lower`, or by hand.
        rendezvous: prove that the program finishes with rendezvous channels; otherwise only with
            buffered ones.
    Returns:
        the walk, with forwards of cost 1 and backwards of cost 2.
    """
    checks = [_RankCheck(program, rank) for rank in range(program.placement.num_ranks)]
    for check in checks:
        check.run()
    for source in checks:
        for target, sent in source.sent.items():
            received = checks[target].received.get(source.rank, [])
            if sent != received:
                raise _mismatch(program, source, checks[target])
    for target_check in checks:
        for origin in target_check.received:
            if target_check.rank not in checks[origin].sent:
                raise _mismatch(program, checks[origin], target_check)
    return _check_progress(
        program, ChannelModel.RENDEZVOUS if rendezvous else ChannelModel.BUFFERED
    )


def validate_rank(program: Program, rank: int) -> None:
    """Check one rank without the programs of other ranks: points 1, 2, 4, 5 and 6."""
    _RankCheck(program, rank).run()


class _RankCheck:
    """Static checks of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        placement = program.placement
        self.program = program
        self.rank = rank
        self.num_chunks = placement.num_chunks
        chunks = range(self.num_chunks)
        self.previous = [placement.previous(rank, chunk) for chunk in chunks]
        self.next = [placement.next(rank, chunk) for chunk in chunks]
        num_entries = program.num_microbatches * self.num_chunks
        # The steps seen so far: by op, then by microbatch * num_chunks + chunk.
        self.done = [bytearray(num_entries) for _ in Op]
        self.received: dict[int, list[Crossing]] = defaultdict(list)
        self.sent: dict[int, list[Crossing]] = defaultdict(list)
        self.num_unused: dict[int, int] = defaultdict(int)
        self.num_unfinished: dict[int, int] = defaultdict(int)
        # A receiver follows the sender's order, so it may post receives that it needs only later.
        self.receive_limit = program.prefetch + 1 + program.send_window
        self.backwards_left = [
            0 if program.forward_only else program.num_microbatches for _ in chunks
        ]
        self.is_released = [False for _ in chunks]

    def run(self) -> None:
        """Check every step in order, then that nothing is missing."""
        num_chunks, num_microbatches = self.num_chunks, self.program.num_microbatches
        done = self.done
        steps = self.program.ranks[self.rank]
        for position, step in enumerate(steps):
            op, microbatch, chunk = step
            if not 0 <= chunk < num_chunks:
                self.fail(step, "names a chunk that does not exist", f"there are {num_chunks}")
            if op >= Op.PARAM_GATHER:
                if op is OVERLAP_F_B:
                    self.pair(step, *steps[position + 1 : position + 3])
                self.bookkeeping(step)
                continue
            if not 0 <= microbatch < num_microbatches:
                self.fail(
                    step, "names a micro batch that does not exist", f"there are {num_microbatches}"
                )
            index = microbatch * num_chunks + chunk
            if done[op][index]:
                self.fail(step, "appears twice", "every step is done once")
            if op <= WEIGHT_GRAD:
                self.compute(step, index)
            elif op <= RECV_GRADIENT:
                self.receive(step)
            elif op <= SEND_GRADIENT:
                self.send(step, index)
            else:
                self.free(step, index)
            done[op][index] = 1
        self.complete()

    def compute(self, step: Step, index: int) -> None:
        """Check order and input of an F, B, I or W."""
        op, microbatch, chunk = step
        done = self.done
        if op is FORWARD:
            source, receive = self.previous[chunk], RECV_ACTIVATION
        else:
            source, receive = self.next[chunk], RECV_GRADIENT
            if not done[FORWARD][index]:
                self.fail(step, "is before its forward", "a backward follows its forward")
            if op is WEIGHT_GRAD and not done[INPUT_GRAD][index]:
                self.fail(
                    step, "is before its input gradient", "a weight gradient is the second half"
                )
            if op is not WEIGHT_GRAD and (done[BACKWARD][index] or done[INPUT_GRAD][index]):
                self.fail(step, "is a second backward of its micro batch", "one backward each")
            if op is not INPUT_GRAD:
                self.backwards_left[chunk] -= 1
            if op is WEIGHT_GRAD:
                return
        if source is None:
            return
        if source[0] != self.rank:
            if not done[receive][index]:
                self.fail(step, "has no receive before it", "another rank sends its input")
            self.num_unused[source[0]] -= 1
        elif not self.is_made(receive, microbatch * self.num_chunks + source[1]):
            self.fail(
                step, "is before the step that makes its input", "stages of one rank keep order"
            )

    def pair(self, combine: Step, *halves: Step) -> None:
        """Check that a forward and an independent backward follow."""
        if [op for op, _, _ in halves] != [FORWARD, BACKWARD]:
            self.fail(
                combine,
                "has no forward and backward after it",
                "it overlaps the two steps that follow it",
            )
        if halves[0][1:] == halves[1][1:]:
            self.fail(
                halves[1], "is combined with its own forward", "a backward follows its forward"
            )

    def is_made(self, kind: Op, index: int) -> bool:
        """Return whether the step that makes an activation or gradient was seen."""
        if kind is RECV_ACTIVATION or kind is SEND_ACTIVATION:
            return bool(self.done[FORWARD][index])
        return bool(self.done[BACKWARD][index] or self.done[INPUT_GRAD][index])

    def receive(self, step: Step) -> None:
        op, microbatch, chunk = step
        source = (self.previous if op is RECV_ACTIVATION else self.next)[chunk]
        if source is None or source[0] == self.rank:
            self.fail(step, "has no sender", "only data from another rank are received")
        self.received[source[0]].append((op is RECV_GRADIENT, microbatch, chunk))
        self.num_unused[source[0]] += 1
        if self.num_unused[source[0]] > self.receive_limit:
            self.fail(
                step,
                f"is unused receive number {self.num_unused[source[0]]} from rank {source[0]}",
                f"at most {self.receive_limit} buffers wait for data",
            )

    def send(self, step: Step, index: int) -> None:
        op, microbatch, chunk = step
        target = (self.next if op is SEND_ACTIVATION else self.previous)[chunk]
        if target is None or target[0] == self.rank:
            self.fail(step, "has no receiver", "only data for another rank are sent")
        if not self.is_made(op, index):
            self.fail(step, "is before the step that makes its data", "data are made, then sent")
        self.sent[target[0]].append((op is SEND_GRADIENT, microbatch, target[1]))
        self.num_unfinished[target[0]] += 1
        if self.num_unfinished[target[0]] > self.program.send_window:
            self.fail(
                step,
                f"is unfinished send number {self.num_unfinished[target[0]]} to rank {target[0]}",
                f"at most {self.program.send_window} buffers wait to be received",
            )

    def free(self, step: Step, index: int) -> None:
        op, _, chunk = step
        sent, side = (
            (SEND_ACTIVATION, self.next) if op is FREE_OUTPUT else (SEND_GRADIENT, self.previous)
        )
        target = side[chunk]
        if target is None or not self.done[sent][index]:
            self.fail(step, "frees a buffer that was not sent", "a buffer is sent, then freed")
        self.num_unfinished[target[0]] -= 1

    def bookkeeping(self, step: Step) -> None:
        """Check a PARAM_GATHER or GRAD_SYNC."""
        op, microbatch, chunk = step
        if op is not GRAD_SYNC:
            return
        allowed = 0 if microbatch == NO_MICROBATCH else 1
        if self.is_released[chunk] or self.backwards_left[chunk] > allowed:
            self.fail(
                step,
                "releases gradients twice, or before they are complete",
                "the gradients of a chunk are reduced once, with or after its last backward",
            )
        self.is_released[chunk] = True

    def complete(self) -> None:
        """Check that nothing is missing at the end of the program."""
        done, trains = self.done, not self.program.forward_only
        for index in range(len(done[FORWARD])):
            microbatch, chunk = divmod(index, self.num_chunks)
            if not done[FORWARD][index]:
                self.missing(Step(FORWARD, microbatch, chunk))
            if trains and not (done[BACKWARD][index] or done[WEIGHT_GRAD][index]):
                self.missing(Step(BACKWARD, microbatch, chunk))
            for sent, free in ((SEND_ACTIVATION, FREE_OUTPUT), (SEND_GRADIENT, FREE_GRADIENT)):
                if done[sent][index] and not done[free][index]:
                    self.missing(Step(free, microbatch, chunk))
        for chunk, is_released in enumerate(self.is_released):
            if trains and not is_released:
                self.missing(Step(GRAD_SYNC, NO_MICROBATCH, chunk))
        for source, count in self.num_unused.items():
            if count:
                _, microbatch, chunk = self.received[source][-1]
                self.fail(
                    Step(FORWARD, microbatch, chunk),
                    f"is followed by {count} receives from rank {source} that no step uses",
                    "every receive is used",
                )

    def missing(self, step: Step) -> NoReturn:
        self.fail(step, "is missing", "every chunk runs every micro batch and frees every send")

    def fail(self, step: Step, found: str, rule: str) -> NoReturn:
        raise _error(self.program, {self.rank: step}, found, rule)


def _mismatch(program: Program, source: _RankCheck, target: _RankCheck) -> ScheduleError:
    """Return the error for the first message that differs between the ends of a channel."""
    sent, received = source.sent[target.rank], target.received[source.rank]
    index = next(
        i
        for i in range(max(len(sent), len(received)))
        if i >= len(sent) or i >= len(received) or sent[i] != received[i]
    )
    given = _receive_step(sent[index]) if index < len(sent) else None
    taken = _receive_step(received[index]) if index < len(received) else None
    chunks = program.placement.num_chunks
    marked = taken or given
    assert marked is not None
    return _error(
        program,
        {target.rank: marked},
        f"is message {index} from rank {source.rank} to rank {target.rank}: the sender gives "
        f"{given.label(chunks) if given else 'nothing'}, the receiver takes "
        f"{taken.label(chunks) if taken else 'nothing'}",
        "the k-th send of a channel is its k-th receive",
    )


def _receive_step(crossing: Crossing) -> Step:
    is_gradient, microbatch, chunk = crossing
    return Step(RECV_GRADIENT if is_gradient else RECV_ACTIVATION, microbatch, chunk)


def _check_progress(program: Program, channels: ChannelModel) -> Walk:
    """Check that no rank waits forever."""
    walked = walk(program, Costs(), channels)
    blocked = walked.blocked
    if not blocked:
        return walked
    if channels is ChannelModel.RENDEZVOUS:
        _check_progress(program, ChannelModel.BUFFERED)  # the worse finding, if it is one
    chunks = program.placement.num_chunks
    waits = []
    for rank, (position, wait) in sorted(blocked.items()):
        here = program.ranks[rank][position]
        needed = "its receiver" if here == wait else wait.label(chunks)
        waits.append(f"rank {rank} is at {here.label(chunks)} and waits for {needed}")
    more = f"; and {len(waits) - 8} more" if len(waits) > 8 else ""
    raise _error(
        program,
        {rank: program.ranks[rank][blocked[rank][0]] for rank in sorted(blocked)},
        f"never runs with {channels.value} channels: {'; '.join(waits[:8])}{more}",
        "a program finishes on every transport",
    )


def _error(program: Program, marked: dict[int, Step], found: str, rule: str) -> ScheduleError:
    """Return an error about the first marked step, with all of them shown in the grid."""
    rank, step = next(iter(marked.items()))
    return ScheduleError(
        f"{program.schedule} program, rank {rank}: {step.label(program.placement.num_chunks)} "
        f"{found}.\n{order_text(program, marked)}",
        rule=rule,
        fix="correct the order, or use one of megatron.core.pipeline_parallel.schedule_definitions",
    )


def order_text(program: Program, marked: dict[int, Step], width: int = 16) -> str:
    """Return the compute steps of all ranks in program order, with marked cells in brackets.

    Args:
        program: any program; it need not be valid.
        marked: rank -> step to mark; for a communication step, its compute step is marked.
        width: number of columns shown around the first marked cell.
    """
    rows = []
    chunks = program.placement.num_chunks
    centre = None
    for rank in range(program.placement.num_ranks):
        cells = [step.label(chunks) for step in program.compute_steps(rank)]
        if rank in marked:
            index = _nearest_compute_step(program, rank, marked[rank])
            if index is None:
                cells.append(f"[{marked[rank].label(chunks)}]")
                index = len(cells) - 1
            else:
                cells[index] = f"[{cells[index]}]"
            centre = index if centre is None else centre
        rows.append(cells)
    first = max(0, (centre or 0) - width // 2)
    cell_width = max((len(cell) for row in rows for cell in row), default=1) + 1
    lines = []
    for rank, row in enumerate(rows):
        shown = "".join(cell.ljust(cell_width) for cell in row[first : first + width])
        left = "... " if first else ""
        right = "..." if len(row) > first + width else ""
        lines.append(f"rank {rank:>2} | {left}{shown}{right}".rstrip())
    return "\n".join(lines)


def _nearest_compute_step(program: Program, rank: int, step: Step) -> int | None:
    """Return the index of the compute step that a step belongs to."""
    forward = step.op in (Op.FORWARD, Op.RECV_ACTIVATION, Op.SEND_ACTIVATION, Op.FREE_OUTPUT)
    for index, candidate in enumerate(program.compute_steps(rank)):
        same = (candidate.microbatch, candidate.chunk) == (step.microbatch, step.chunk)
        if same and (candidate.op is step.op or (candidate.op is Op.FORWARD) == forward):
            return index
    return None
