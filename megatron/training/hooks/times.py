"""Account of the time of all ranks: compute, waits, and activities between steps."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from megatron.core.foundation.flight_recorder import DATA, PEERS, PROGRESS, Channel, Waits
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import sum_across_ranks
from megatron.training.hooks.base import Hook
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import StopReason, TakenStep, TrainState

PARTS = ("compute", "exposed communication", "bubble", "data", "checkpoint", "evaluation", "other")
"""Parts of an interval, with their names in the log line."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one rank in one step."""

    step_s: float
    communication_s: float
    """Wait in collectives within a stage, for transfers and for slower ranks."""
    bubble_s: float
    """Wait for other stages of the pipeline."""
    data_s: float
    """Wait for the loader."""
    cpu_s: float
    """Processor time of the training thread, without its loader."""
    queued_s: float = 0.0
    """Time in which the thread was ready without a processor; 0 if the kernel does not count it."""
    group_s: Mapping[tuple[int, ...], float] = field(default_factory=dict)
    """Ranks of a group -> wait in its collectives."""

    @property
    def compute_s(self) -> float:
        """Remaining time of the step, without waits."""
        return self.step_s - self.communication_s - self.bubble_s - self.data_s


class StepClock:
    """Measures the steps of this rank from its waits.

    Args:
        pipeline_ranks: global ranks of this rank's pipeline. A wait in a group with several of
            them counts as a wait for another stage.
    """

    def __init__(self, waits: Waits, pipeline_ranks: Collection[int] = ()) -> None:
        self._waits = waits
        self._pipeline = frozenset(pipeline_ranks)
        self._joins_stages: dict[int, bool] = {PEERS: True}
        self._queue = QueuedTime()
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._seconds = dict(self._waits.seconds)
        self._queued_s = self._queue.read()
        self._cpu_s = time.thread_time() - self._waits.loading_cpu_s
        self._started_at = time.perf_counter()

    def stop(self) -> StepTimes:
        """End the step and return its times."""
        step_s = time.perf_counter() - self._started_at
        cpu_s = time.thread_time() - self._waits.loading_cpu_s - self._cpu_s
        waited = {"data": 0.0, "bubble": 0.0, "communication": 0.0}
        group_s: dict[tuple[int, ...], float] = {}
        for number, seconds in self._waits.seconds.items():
            if spent := seconds - self._seconds.get(number, 0.0):
                waited[self._kind(number)] += spent
                if number >= 0 and (channel := self._waits.channels[number]).tag >= 0:
                    group_s[channel.ranks] = group_s.get(channel.ranks, 0.0) + spent
        return StepTimes(
            step_s=step_s,
            communication_s=waited["communication"],
            bubble_s=waited["bubble"],
            data_s=waited["data"],
            cpu_s=cpu_s,
            queued_s=self._queue.read() - self._queued_s,
            group_s=group_s,
        )

    def _kind(self, number: int) -> str:
        if number == DATA:
            return "data"
        if number not in self._joins_stages:
            self._joins_stages[number] = joins_stages(self._waits.channels[number], self._pipeline)
        return "bubble" if self._joins_stages[number] else "communication"


class QueuedTime:
    """Time that the calling thread was ready without a processor, as Linux counts it."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(
                f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY
            )
            weakref.finalize(self, os.close, self._file)

    def read(self) -> float:
        """Return seconds; always 0 if the system does not count this time."""
        if self._file is None:
            return 0.0
        _running, queued_ns, _turns = os.pread(self._file, 64, 0).split()
        return int(queued_ns) / 1e9


def joins_stages(channel: Channel, pipeline_ranks: Collection[int]) -> bool:
    """Return whether operations on the channel are between stages of a pipeline."""
    return channel.tag < 0 or len(set(channel.ranks) & set(pipeline_ranks)) > 1


class IntervalTimes:
    """Sums of one rank over an interval of steps and the activities between them."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._steps: list[StepTimes] = []
        self._activity_s = self._activities()
        self._began_at = time.perf_counter()

    def _activities(self) -> Mapping[str, float]:
        self._waits.update_activity()
        return dict(self._waits.activity_s)

    def add(self, step: StepTimes) -> None:
        """Count a step."""
        self._steps.append(step)

    def seconds(self) -> list[float]:
        """Return the seconds of each of PARTS, which add up to the interval."""
        full = time.perf_counter() - self._began_at
        checkpoint = evaluation = 0.0
        for activity, seconds in self._activities().items():
            spent = seconds - self._activity_s.get(activity, 0.0)
            checkpoint += spent * ("checkpoint" in activity)
            evaluation += spent * (activity == "evaluating")
        parts = [
            sum(step.compute_s for step in self._steps),
            sum(step.communication_s for step in self._steps),
            sum(step.bubble_s for step in self._steps),
            sum(step.data_s for step in self._steps),
            checkpoint,
            evaluation,
        ]
        return [*parts, max(full - sum(parts), 0.0)]


def shares_of(seconds: list[float]) -> dict[str, float]:
    """Return part -> share of the sum."""
    full = sum(seconds) or 1.0
    return {part: spent / full for part, spent in zip(PARTS, seconds, strict=True)}


class MeasureTimes(Hook):
    """Measures the shares of compute, communication, bubble, data, checkpoints and evaluations in
    the time since the last log line, as means over all ranks.

    Communication:
        an all-reduce of a few numbers over all processes at every log line.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.interval = context.run.logging.log_interval
        self.shares: dict[str, float] = {}
        """Part -> share in the last interval. Empty before the first interval ends; every interval
        makes a new dict."""
        self.last: StepTimes | None = None
        """Times of this rank's last step."""
        self._clock = StepClock(PROGRESS.waits, context.groups.ranks.get("pp", ()))
        self._sums = IntervalTimes(PROGRESS.waits)

    def before_training(self, state: TrainState) -> TrainState:
        """Begin the first interval."""
        self._sums = IntervalTimes(PROGRESS.waits)
        return state

    def before_step(self, state: TrainState) -> None:
        """Begin a step."""
        self._clock.start()

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """End the step, and the interval if a log line follows."""
        self.last = self._clock.stop()
        self._sums.add(self.last)
        if state.iteration % self.interval == 0:
            self._end_interval()
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """End the step that was rolled back; the rollback itself counts as other time."""
        self._sums.add(self._clock.stop())

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """End the interval of a run that is too short for a log line."""
        if not self.shares:
            self._end_interval()
        return state

    def _end_interval(self) -> None:
        self.shares = shares_of(sum_across_ranks(self._sums.seconds(), torch_collectives.world()))
        self._sums = IntervalTimes(PROGRESS.waits)
