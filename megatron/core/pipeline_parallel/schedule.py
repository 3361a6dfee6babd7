"""A pipeline schedule as one record: its order, its limits and its placement of stages.

Pure integers, no torch. Each file of `schedule_definitions/` registers one record. The layout of
stages, the rules of a run, the executor's plan and the tools read the record; no code tests the
name of a schedule. Another project registers its schedule the same way, before the command line is
parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.foundation.errors import MegatronError, ScheduleError
from megatron.core.pipeline_parallel.instructions import Orders, PlacementShape


class StepPlan(NamedTuple):
    """The numbers that determine the program of a step."""

    schedule: str
    pipeline_size: int
    num_chunks: int
    num_microbatches: int
    group_size: int | None = None
    forward_only: bool = False
    prefetch: int = 1
    durations: tuple[int, int, int] = (1, 1, 1)
    overlap_f_b: bool = False

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole model."""
        return self.pipeline_size * self.num_chunks


def _one(_plan: StepPlan) -> int:
    return 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule of training steps."""

    name: str
    """Value of `--pipeline-schedule` and `config.pipeline_schedule`."""
    title: str
    """Name in messages, in the spelling of the paper."""
    orders: Callable[[StepPlan], Orders]
    """Return the compute steps of all ranks for a plan; raises `ScheduleError` if the schedule does
    not support its numbers."""
    shape: PlacementShape = PlacementShape.LOOP
    """How stages are assigned to ranks."""
    num_chunks: int | None = 1
    """Model chunks on every rank of a pipeline; None allows any number (interleaved)."""
    splits_backward: bool = False
    """Computes weight gradients separately from input gradients."""
    overlaps_f_b: bool = False
    """The steady state has pairs of a forward and a backward that are independent of each other."""
    runs_forwards_first: bool = False
    """All forwards of a step run before the first backward."""
    min_microbatches: Callable[[StepPlan], int] = _one
    """Fewest micro batches of a training step."""
    min_microbatches_rule: str = "a step has at least one micro batch"
    """Reason for the limit, as the rule of an error message."""

    def name_with(self, num_chunks: int) -> str:
        """Return the name of the schedule with `num_chunks` chunks on every rank."""
        is_interleaved = self.num_chunks is None and num_chunks > 1
        return f"interleaved {self.title}" if is_interleaved else self.name

    def takes_chunks(self, num_chunks: int, pipeline_size: int) -> bool:
        """Return whether a rank may have `num_chunks` chunks; one rank may have one chunk."""
        if self.num_chunks is None or pipeline_size == num_chunks == 1:
            return True
        return num_chunks == self.num_chunks

    def chunks_error(
        self, num_chunks: int, kind: type[MegatronError] = ScheduleError
    ) -> MegatronError:
        """Return the error for an unsupported number of chunks."""
        return kind(
            f"the {self.name} schedule with {num_chunks} model chunks per rank.",
            rule=f"it runs {self.num_chunks} chunk(s) on every rank",
            flags=[
                "--pipeline-schedule",
                "--num-virtual-stages-per-pipeline-rank",
                "--pipeline-model-parallel-layout",
            ],
            fix="drop the virtual stages, or use --pipeline-schedule"
            f" {_names(lambda known: known.num_chunks is None)} (interleaved)",
        )

    def overlap_error(self, kind: type[MegatronError] = ScheduleError) -> MegatronError:
        """Return the error for a schedule without pairs of a forward and a backward."""
        return kind(
            f"overlapped forwards and backwards in the {self.name} schedule.",
            rule="each forward of the steady state is paired with an independent backward",
            flags=["--overlap-moe-expert-parallel-comm", "--pipeline-schedule"],
            fix=f"use --pipeline-schedule {_names(lambda known: known.overlaps_f_b)}",
        )


SCHEDULES: dict[str, Schedule] = {}
"""The registered schedules by name, sorted; `schedule_definitions` fills it."""


def register_schedule(schedule: Schedule) -> Schedule:
    """Register a schedule: its name becomes a value of `--pipeline-schedule`."""
    if SCHEDULES.get(schedule.name, schedule) is not schedule:
        raise ScheduleError(
            f"two schedules are registered as {schedule.name!r}.",
            rule="a name identifies one schedule",
            flags=["--pipeline-schedule"],
            fix="give the second schedule another name",
        )
    known = {**SCHEDULES, schedule.name: schedule}
    SCHEDULES.clear()
    SCHEDULES.update(
        sorted(known.items())
    )  # messages and help do not depend on the order of imports
    return schedule


def _names(has: Callable[[Schedule], bool]) -> str:
    """Return the names of the schedules that have a property, for a message."""
    return " or ".join(name for name, schedule in SCHEDULES.items() if has(schedule))
