"""The data types of pipeline programs: steps, the placement of stages, orders and programs.

Pure integers, no torch. `schedule_definitions/` write the compute steps of a schedule, `lower.py`
adds communication, `validate.py` proves the program, `simulate.py` times it, `timeline.py` draws it
and `executor.py` runs it. All of them use the types of this file.

Legend: `p` pipeline ranks, `v` model chunks per rank, `m` micro batches, `stage` a position in
the whole model, 0 ... p*v - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple


class Op(IntEnum):
    """Kind of a step. Each comment gives the condition under which the step blocks its rank."""

    FORWARD = 0  # waits for the chunk's input activation
    BACKWARD = 1  # waits for the gradient of the chunk's output; input and weight gradient at once
    INPUT_GRAD = 2  # waits like BACKWARD; computes the gradient of the input only
    WEIGHT_GRAD = 3  # never blocks: INPUT_GRAD has waited for the same data
    RECV_ACTIVATION = 4  # posts the receive of a chunk's input, never blocks
    RECV_GRADIENT = 5  # posts the receive of the gradient of a chunk's output, never blocks
    SEND_ACTIVATION = 6  # posts the send of a chunk's output, never blocks
    SEND_GRADIENT = 7  # posts the send of the gradient of a chunk's input, never blocks
    FREE_OUTPUT = 8  # waits for the send of an output, then releases its memory
    FREE_GRADIENT = 9  # waits for the send of a gradient, then releases its memory
    PARAM_GATHER = 10  # starts to gather the parameters of a chunk before their use
    GRAD_SYNC = 11  # enables the reduction of a chunk's gradients over replicas
    OVERLAP_F_B = 12  # the next two steps, a forward and a backward, overlap


# A lookup of an enum member costs more than making a step, so loops over steps use these names.
FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = Op(0), Op(1), Op(2), Op(3)
RECV_ACTIVATION, RECV_GRADIENT = Op.RECV_ACTIVATION, Op.RECV_GRADIENT
SEND_ACTIVATION, SEND_GRADIENT = Op.SEND_ACTIVATION, Op.SEND_GRADIENT
FREE_OUTPUT, FREE_GRADIENT = Op.FREE_OUTPUT, Op.FREE_GRADIENT
PARAM_GATHER, GRAD_SYNC, OVERLAP_F_B = Op.PARAM_GATHER, Op.GRAD_SYNC, Op.OVERLAP_F_B

COMPUTE_OPS = frozenset((FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD))

SHORT_NAME = {
    Op.FORWARD: "F",
    Op.BACKWARD: "B",
    Op.INPUT_GRAD: "I",
    Op.WEIGHT_GRAD: "W",
    Op.RECV_ACTIVATION: "recv-act",
    Op.RECV_GRADIENT: "recv-grad",
    Op.SEND_ACTIVATION: "send-act",
    Op.SEND_GRADIENT: "send-grad",
    Op.FREE_OUTPUT: "free-out",
    Op.FREE_GRADIENT: "free-grad",
    Op.PARAM_GATHER: "param-gather",
    Op.GRAD_SYNC: "grad-sync",
    Op.OVERLAP_F_B: "overlap-f-b",
}

NO_MICROBATCH = -1


class Step(NamedTuple):
    """One instruction of one rank.

    `microbatch` is `NO_MICROBATCH` for PARAM_GATHER and OVERLAP_F_B, and for a GRAD_SYNC after the
    last backward of its chunk. A GRAD_SYNC before that backward has the backward's micro batch.
    """

    op: Op
    microbatch: int
    chunk: int

    def label(self, num_chunks: int = 2) -> str:
        """Return a short text such as `F3` (micro batch 3) or `F3.1` (micro batch 3, chunk 1)."""
        microbatch = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        chunk = f".{self.chunk}" if num_chunks > 1 else ""
        return f"{SHORT_NAME[self.op]}{microbatch}{chunk}"


class PlacementShape(Enum):
    """How the stages of the model are assigned to ranks."""

    LOOP = "loop"  # chunk c of rank r is stage c*p + r: every chunk passes the ranks in order
    V = "v"  # odd chunks pass the ranks in reverse order: the last rank has two adjacent stages


class Placement(NamedTuple):
    """Rank and chunk of every stage."""

    num_ranks: int
    num_chunks: int = 1
    shape: PlacementShape = PlacementShape.LOOP

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model, p*v."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that `rank` holds as its model chunk number `chunk`."""
        if self.shape is PlacementShape.V and chunk % 2:
            return (chunk + 1) * self.num_ranks - 1 - rank
        return chunk * self.num_ranks + rank

    def location(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a stage."""
        chunk, position = divmod(stage, self.num_ranks)
        if self.shape is PlacementShape.V and chunk % 2:
            position = self.num_ranks - 1 - position
        return position, chunk

    def previous(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return (rank, chunk) of the stage before this one, None for the first stage."""
        stage = self.stage(rank, chunk)
        return self.location(stage - 1) if stage > 0 else None

    def next(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return (rank, chunk) of the stage after this one, None for the last stage."""
        stage = self.stage(rank, chunk)
        return self.location(stage + 1) if stage + 1 < self.num_stages else None

    def neighbours(self, rank: int) -> set[int]:
        """Return the other ranks that exchange activations and gradients with a rank."""
        locations = [self.previous(rank, chunk) for chunk in range(self.num_chunks)]
        locations += [self.next(rank, chunk) for chunk in range(self.num_chunks)]
        return {index[0] for index in locations if index is not None} - {rank}


@dataclass(frozen=True)
class Orders:
    """The compute steps of every rank, without communication.

    The order of a rank is computed on first use: in a large job, a rank needs only its own order
    and the orders of its neighbours.

    Attributes:
        schedule: name for messages and pictures.
        placement: rank and chunk of each stage.
        num_microbatches: m.
        forward_only: True if no backward is run.
        order: rank -> its compute steps.
        send_window: number of unfinished sends that a channel must hold so that, with stages of
            equal duration, no rank waits for a receiver.
        pairs: rank -> indices in its order of each forward that overlaps with the next step, an
            independent backward. The two alternate, and their results are sent when both have
            ended. With None no steps overlap.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    forward_only: bool
    order: Callable[[int], list[Step]]
    send_window: int = 2
    pairs: Callable[[int], Collection[int]] | None = None
    _known: dict[int, tuple[Step, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return self.placement.num_ranks

    def __getitem__(self, rank: int) -> tuple[Step, ...]:
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        if rank not in self._known:
            self._known[rank] = tuple(self.order(rank))
        return self._known[rank]

    def __iter__(self) -> Iterator[tuple[Step, ...]]:
        return (self[rank] for rank in range(len(self)))


@dataclass(frozen=True)
class Program:
    """The full instruction list of every rank of a pipeline.

    Attributes:
        schedule: name of the schedule.
        placement: rank and chunk of each stage.
        num_microbatches: m.
        forward_only: True if no backward is run.
        ranks: steps of each rank, in execution order.
        prefetch: number of compute steps between the post of a receive and its use.
        send_window: largest number of unfinished sends on one channel.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    forward_only: bool
    ranks: tuple[tuple[Step, ...], ...]
    prefetch: int
    send_window: int

    def compute_steps(self, rank: int) -> list[Step]:
        """Return only the F, B, I and W steps of a rank."""
        return [step for step in self.ranks[rank] if step.op in COMPUTE_OPS]
