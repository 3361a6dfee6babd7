"""The cases: which signal reaches which process at which moment of a run."""

import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from signal import Signals
from typing import Protocol, TypeVar


class Target(Enum):
    """Whom a signal is sent to."""

    RANK_0 = "rank-0"
    RANK_1 = "rank-1"
    WORKER = "worker"
    """A loader worker of rank 0."""
    LAUNCHER = "launcher"
    """torchrun."""
    GROUP = "group"
    """The process group of what the user started, as Ctrl-C in a terminal does it."""
    ALL = "all"
    """Every process of the job, as a scheduler that ends a job step does it."""


class Moment(Enum):
    """When a signal is sent; `moments.py` says how each is recognised from outside."""

    IMPORT = "import"
    START = "start"
    STEP = "step"
    EVALUATION = "evaluation"
    SAVE = "save"
    ASYNC_SAVE = "async-save"
    EXIT = "exit"


class Workers(Enum):
    """How many loader workers a rank has."""

    NONE = 0
    DEFAULT = 2


@dataclass(frozen=True)
class Fault:
    """One signal."""

    signal: Signals
    target: Target
    moment: Moment


@dataclass(frozen=True)
class Case:
    """A run, and what happens to it."""

    faults: tuple[Fault, ...]
    has_handler: bool = False
    """Whether it runs with --exit-signal-handler."""
    workers: Workers = Workers.NONE
    num_ranks: int = 2
    """Without torchrun if 1."""
    stays_stopped: bool = False
    """Whether nobody continues a process that SIGSTOP stopped."""
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Say all of it in one word."""
        first = self.faults[0]
        kinds = dict.fromkeys(fault.signal.name.removeprefix("SIG") for fault in self.faults)
        moments = dict.fromkeys(fault.moment.value for fault in self.faults)
        is_repeated = len(self.faults) > 1 and len(kinds) == len(moments) == 1
        signals = "+".join(kinds) + "-twice" * is_repeated
        parts = [signals, first.target.value, "+".join(moments)]
        parts += ["torchrun" if self.num_ranks > 1 else "python"]
        parts += ["handler"] * self.has_handler
        parts += ["for-good"] * self.stays_stopped
        parts += [f"{self.workers.value}-workers"]
        return "/".join(parts)

    @property
    def moments(self) -> set[Moment]:
        """When something happens."""
        return {fault.moment for fault in self.faults}

    @property
    def may_finish(self) -> bool:
        """Whether all steps may be done although the run was disturbed."""
        return Moment.EXIT in self.moments

    @property
    def is_pause(self) -> bool:
        """Whether the run is only paused."""
        return not self.stays_stopped and all(f.signal is STOP for f in self.faults)


WITH_WORKERS = (Moment.STEP, Moment.EVALUATION, Moment.SAVE, Moment.ASYNC_SAVE)
"""Moments at which a run has loader workers."""
TERM, INT, KILL, STOP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP


def matrix() -> list[Case]:
    """Return each signal at each moment to each target, alternately with and without workers.

    SIGTERM comes with and without --exit-signal-handler. All pauses of one target are one run.
    Those that wait for a limit of time come first: at the end they would wait alone.
    """
    return sorted([*_ends(), *_pauses(), *_extras()], key=lambda case: not case.stays_stopped)


def _ends() -> Iterator[Case]:
    workers = itertools.cycle((Workers.DEFAULT, Workers.NONE))
    ranks = itertools.cycle((Target.RANK_0, Target.RANK_1))
    for number, has_handler in ((TERM, True), (TERM, False), (INT, False), (KILL, False)):
        for moment in Moment:
            yield Case((Fault(number, next(ranks), moment),), has_handler, next(workers))
            yield Case((Fault(number, Target.LAUNCHER, moment),), has_handler, next(workers))
            next(workers)  # so that both targets meet moments with and without
    for number, has_handler in ((TERM, True), (INT, False), (KILL, False)):
        for moment in Moment:
            yield Case((Fault(number, Target.GROUP, moment),), has_handler, next(workers), 1)
    for number, has_handler in ((TERM, True), (KILL, False)):
        for moment in WITH_WORKERS:
            yield Case((Fault(number, Target.WORKER, moment),), has_handler, Workers.DEFAULT)
    for number, has_handler in ((TERM, True), (INT, False), (KILL, False)):
        for moment in (Moment.START, Moment.STEP, Moment.SAVE):
            yield Case((Fault(number, Target.ALL, moment),), has_handler, Workers.DEFAULT)


def _pauses() -> Iterator[Case]:
    for target in (Target.RANK_0, Target.RANK_1, Target.LAUNCHER, Target.WORKER, Target.GROUP):
        moments = WITH_WORKERS if target is Target.WORKER else tuple(Moment)
        is_alone = target is Target.GROUP
        has_workers = target in (Target.WORKER, Target.RANK_1, Target.GROUP)
        for is_async in (False, True):
            left_out = Moment.SAVE if is_async else Moment.ASYNC_SAVE
            faults = tuple(Fault(STOP, target, m) for m in moments if m is not left_out)
            if is_async:
                faults = tuple(f for f in faults if f.moment is Moment.ASYNC_SAVE)
            workers = Workers.DEFAULT if has_workers else Workers.NONE
            yield Case(faults, False, workers, 1 if is_alone else 2)


def _extras() -> Iterator[Case]:
    # A scheduler that asks twice.
    for moment in (Moment.STEP, Moment.EVALUATION):
        again = (Fault(TERM, Target.LAUNCHER, moment),) * 2
        yield Case(again, True, Workers.DEFAULT)
    # Ctrl-C that saves; a launcher that dies while its ranks can save.
    ctrl_c = Fault(INT, Target.LAUNCHER, Moment.STEP)
    yield Case((ctrl_c,), True, Workers.DEFAULT, flags=("--exit-signal", "SIGINT"))
    yield Case((Fault(KILL, Target.LAUNCHER, Moment.STEP),), True, Workers.DEFAULT)
    # A rank that does not answer: the others wait for it, or somebody ends the job.
    stopped = Fault(STOP, Target.RANK_1, Moment.STEP)
    yield Case((stopped,), stays_stopped=True, flags=("--distributed-timeout-minutes", "1"))
    yield Case((stopped, Fault(TERM, Target.LAUNCHER, Moment.STEP)), stays_stopped=True)


def preempt(times: int) -> list[Case]:
    """Return how schedulers end a job: SIGTERM to torchrun, default flags."""
    case = Case((Fault(TERM, Target.LAUNCHER, Moment.STEP),), True, Workers.DEFAULT)
    return [case] * times


class Named(Protocol):
    """What can be asked for by its name."""

    @property
    def name(self) -> str:
        """All of it in one word."""


AnyCase = TypeVar("AnyCase", bound=Named)


def matching(cases: Sequence[AnyCase], pattern: str) -> list[AnyCase]:
    """Return the cases whose names hold all words of `pattern`, or any of its alternatives."""
    choices = [choice.split() for choice in pattern.split("|")]
    return [c for c in cases if any(all(word in c.name for word in words) for words in choices)]
