"""Named timers with a log level, reduced over ranks only when they are reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.foundation import device
from megatron.core.transport import torch_collectives

FINEST_LEVEL = 2
"""Level of timers inside a micro batch; timers of whole steps have level 0."""


class Timer:
    """A stopwatch that accumulates seconds over start/stop pairs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._accumulated_s = 0.0
        self._active_s = 0.0
        self._num_intervals = 0
        self._started_at: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start; waits for queued device work first so that only this section is timed."""
        if self._started_at is not None:
            raise RuntimeError(f"timer {self.name!r} runs already: stop() it before start()")
        if barrier:
            torch_collectives.barrier(torch_collectives.world())
        device.synchronize()
        self._started_at = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop and accumulate."""
        if self._started_at is None:
            raise RuntimeError(f"timer {self.name!r} was not started: start() it before stop()")
        if barrier:
            torch_collectives.barrier(torch_collectives.world())
        device.synchronize()
        seconds = time.perf_counter() - self._started_at
        self._accumulated_s += seconds
        self._active_s += seconds
        self._num_intervals += 1
        self._started_at = None

    def reset(self) -> None:
        """Discard the accumulated seconds; a running interval restarts now."""
        self._accumulated_s = 0.0
        self._num_intervals = 0
        if self._started_at is not None:
            self._started_at = time.perf_counter()

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the accumulated seconds, including a running interval."""
        is_running = self._started_at is not None
        if is_running:
            self.stop(barrier)
        seconds = self._accumulated_s
        if reset:
            self.reset()
        if is_running:
            self.start()
        return seconds

    def active_time(self) -> float:
        """Return the seconds since creation, unaffected by `reset`."""
        return self._active_s


class _SilentTimer(Timer):
    """A timer above the log level, which does nothing."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class Timers:
    """All timers of a run: `timers("forward", log_level=1).start()`.

    Args:
        log_level: timers with a higher level are silent.
        log_option: "max", "minmax" or "all": figures of the ranks in a report.
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        self._log_level = log_level
        self._log_option = log_option
        self._timers: dict[str, Timer] = {}
        self._silent = _SilentTimer("silent")
        self._silent_names: set[str] = set()

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer `name`, created at `log_level`.

        Without a level a new timer gets the finest level: so `timers("x").stop()` does nothing if
        `timers("x", log_level=2).start()` did nothing.
        """
        timer = self._timers.get(name)
        if timer is None:
            if (FINEST_LEVEL if log_level is None else log_level) > self._log_level:
                return self._silent
            timer = self._timers[name] = Timer(name)
        return timer

    @property
    def names(self) -> list[str]:
        """Names of the timers that ran on this rank; ranks of different stages may differ."""
        return list(self._timers)

    def seconds_of_all_ranks(
        self, names: Sequence[str] | None = None, *, reset: bool = True, normalizer: float = 1.0
    ) -> dict[str, list[float]]:
        """Gather each timer's seconds / normalizer from every rank; 0.0 where it never ran.

        Communication:
            one all-gather over all ranks. `names` must be equal on all of them.
        """
        names = list(self._timers) if names is None else list(names)
        mine = [
            self._timers[n].elapsed(reset=reset) / normalizer if n in self._timers else 0.0
            for n in names
        ]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return {name: [value] for name, value in zip(names, mine, strict=True)}
        local = torch.tensor(
            mine,
            dtype=torch.float64,
            device=torch_collectives.tensor_device(torch_collectives.world()),
        )
        table = torch.stack(torch_collectives.all_gather(local, torch_collectives.world())).cpu()
        return {name: table[:, i].tolist() for i, name in enumerate(names)}

    def report(
        self, names: Sequence[str] | None = None, *, reset: bool = True, normalizer: float = 1.0
    ) -> str:
        """Return the report text (milliseconds) in Megatron's form; equal on all ranks."""
        heading = {"max": "max time", "minmax": "(min, max) time"}.get(self._log_option, "times")
        lines = [f"{heading} across ranks (ms):"]
        table = self.seconds_of_all_ranks(names, reset=reset, normalizer=normalizer)
        for name, seconds in table.items():
            milliseconds = [1000.0 * s for s in seconds]
            if max(milliseconds) == 0.0:
                continue
            if self._log_option == "max":
                shown = f"{max(milliseconds):.2f}"
            elif self._log_option == "minmax":
                shown = f"({min(milliseconds):.2f}, {max(milliseconds):.2f})"
            else:
                shown = " ".join(f"{i}: {ms:.2f}" for i, ms in enumerate(milliseconds))
            lines.append(f"    {(name + ' ').ljust(48, '.')}: {shown}")
        return "\n".join(lines)

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the report on global rank `rank` (the last rank if None)."""
        if barrier:
            torch_collectives.barrier(torch_collectives.world())
        text = self.report(names, reset=reset, normalizer=normalizer)
        here = dist.get_rank() if dist.is_initialized() else 0
        last = dist.get_world_size() - 1 if dist.is_initialized() else 0
        if here == (last if rank is None else rank):
            print(text, flush=True)

    def write(
        self,
        names: Sequence[str] | None,
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Add the largest seconds / normalizer of each timer to `writer` as `NAME-time`.

        Args:
            writer: TensorBoard's writer, or None on ranks without one; all ranks call it.
        """
        extremes = self._get_global_min_max_time(names, reset, barrier, normalizer)
        if writer is not None:
            for name, (_, most) in extremes.items():
                writer.add_scalar(f"{name}-time", most, iteration)

    def _get_global_min_max_time(
        self, names: Sequence[str] | None, reset: bool, barrier: bool, normalizer: float
    ) -> dict[str, tuple[float, float]]:
        """Return the least and the most seconds / normalizer of each timer over the ranks.

        Writers that third parties add to the class call it by this name of Megatron's.
        """
        if barrier:
            torch_collectives.barrier(torch_collectives.world())
        table = self.seconds_of_all_ranks(names, reset=reset, normalizer=normalizer)
        return {name: (min(seconds), max(seconds)) for name, seconds in table.items()}
