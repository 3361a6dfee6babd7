"""What is promised for each signal: `docs/failures.md`, "Signals and deaths", as data."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from signal import Signals

from tests.faults.plan import INT, KILL, STOP, TERM, Case, Moment, Target


class Kept(Enum):
    """How new the newest checkpoint is when the job has ended."""

    LAST_STEP = "the last finished step"
    LAST_SAVE = "the last save that was finished when the signal came"
    END = "the end of the run, which goes on"


@dataclass(frozen=True)
class Promise:
    """What must hold after a signal."""

    kept: Kept
    within_s: float
    """After that time no process of the job lives."""
    reason: str
    classes: frozenset[str] = frozenset()
    """One FATAL line is printed, of one of these classes; none is asked for if empty."""
    is_success: bool | None = None
    """Whether the command that the user started returns 0; None: either."""
    is_clean: bool = False
    """Whether the processes end by themselves and remove their temporary files."""


@dataclass(frozen=True)
class Rule:
    """A promise, and where it holds; what is not named holds for all."""

    promise: Promise
    signals: Collection[Signals]
    targets: Collection[Target] = tuple(Target)
    moments: Collection[Moment] = tuple(Moment)
    has_handler: bool | None = None
    num_ranks: Collection[int] = (1, 2)
    stays_stopped: bool = False

    def holds_for(self, case: Case) -> bool:
        """Return whether it is about this case; of several signals the strongest counts."""
        strongest = max(case.faults, key=lambda fault: STRENGTH.index(fault.signal))
        return (
            strongest.signal in self.signals
            and strongest.target in self.targets
            and strongest.moment in self.moments
            and self.has_handler in (None, case.has_handler)
            and case.num_ranks in self.num_ranks
            and self.stays_stopped is case.stays_stopped
        )


STRENGTH = (STOP, TERM, INT, KILL)
RANKS = (Target.RANK_0, Target.RANK_1)
BEFORE_STEPS = (Moment.IMPORT, Moment.START)

RULES = (
    Rule(
        Promise(
            Kept.END, 60.0, "a process that was stopped and goes on has lost nothing but time",
            is_success=True, is_clean=True,
        ),
        signals=(STOP,),
    ),
    Rule(
        Promise(
            Kept.LAST_SAVE, 20.0, "the watchdog of the machine names the stopped rank after 7 s and"
            " ends the job",
            classes=frozenset({"HANG"}), is_success=False,
        ),
        signals=(STOP,), stays_stopped=True,
    ),
    Rule(
        Promise(
            Kept.LAST_SAVE, 45.0, "a stopped rank cannot finish its step: torchrun kills it 30 s"
            " after it has passed on the signal",
        ),
        signals=(TERM,), stays_stopped=True,
    ),
    Rule(
        Promise(
            Kept.LAST_SAVE, 25.0, "there is no step to save yet; what was saved before stays",
        ),
        signals=(TERM,), moments=BEFORE_STEPS,
    ),
    Rule(
        Promise(
            Kept.END, 60.0, "loader workers are the rank's to end: a signal to one of them, which"
            " comes too where a whole group is told to end, is ignored",
            is_success=True,
        ),
        signals=(TERM,), targets=(Target.WORKER,),
    ),
    Rule(
        Promise(
            Kept.LAST_STEP, 25.0, "the step is finished, saved, and the run leaves with 0 before"
            " torchrun's 30 s are over",
            is_success=True, is_clean=True,
        ),
        signals=(TERM,), has_handler=True, targets=(*RANKS, Target.GROUP), num_ranks=(1,),
    ),
    Rule(
        Promise(
            Kept.LAST_STEP, 25.0, "the step is finished, saved, and all ranks leave before"
            " torchrun's 30 s are over; torchrun's own exit code tells of the signal",
            is_clean=True,
        ),
        signals=(TERM,), has_handler=True,
    ),
    Rule(
        Promise(
            Kept.LAST_SAVE, 20.0, "without --exit-signal-handler a signal ends its process, and"
            " the ranks that are left end too",
        ),
        signals=(TERM,), has_handler=False,
    ),
    Rule(
        Promise(
            Kept.LAST_STEP, 25.0, "--exit-signal SIGINT does the same at Ctrl-C", is_clean=True,
        ),
        signals=(INT,), has_handler=True,
    ),
    Rule(
        Promise(Kept.LAST_SAVE, 20.0, "Ctrl-C ends the run; what was saved before stays"),
        signals=(INT,),
    ),
    Rule(
        Promise(
            Kept.LAST_SAVE, 20.0, "a dead loader worker ends the run with a message",
            classes=frozenset({"WORKER_LOST"}), is_success=False,
        ),
        signals=(KILL,), targets=(Target.WORKER,),
    ),
    Rule(
        Promise(
            Kept.LAST_STEP, 35.0, "ranks that save on SIGTERM do so when their launcher is gone",
            is_success=False,
        ),
        signals=(KILL,), targets=(Target.LAUNCHER,), has_handler=True,
    ),
    Rule(
        Promise(
            Kept.LAST_SAVE, 20.0, "nothing can be saved any more; nobody outlives the others",
            is_success=False,
        ),
        signals=(KILL,),
    ),
)  # fmt: skip


def promise_for(case: Case) -> Promise:
    """Return the first rule's that is about the case."""
    return next(rule.promise for rule in RULES if rule.holds_for(case))
