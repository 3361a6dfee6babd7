"""--log-straggler: find ranks, loaders and links that are persistently slower than their peers.

In each step, a rank is compared with peers that should take the same time, so that causes which
slow all of them down cancel. The reference is the median of the other ranks: with two ranks, a
median of all ranks would contain the slow rank. A check uses the interquartile mean over the steps
of a window, which outliers in a quarter of the steps do not affect. A rank is reported at the third
consecutive check that finds it, so that a short disturbance is not reported.

Shapes: t steps, r ranks of the run, n ranks or groups that are compared.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.foundation import device
from megatron.core.topology.rank_grid import RankGrid
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object
from megatron.training.hooks.base import Hook
from megatron.training.hooks.scalars import Scalars
from megatron.training.hooks.times import MeasureTimes
from megatron.training.launch.http_endpoint import HttpEndpoint
from megatron.training.launch.printing import is_last_rank, is_rank_0
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import TakenStep, TrainState

CHECK_INTERVAL = 5
"""Number of steps between two gathers of the times."""
NUM_WARM_UP = 2
"""Number of first steps, which allocate and compile and are not measured."""
LINKS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp", "cp")}
"""Kind of group -> the axes that it spans; groups of the same kind are compared."""
COLUMNS = ("step", "compute", "cpu", "queued", "communication", "bubble", "data")
"""The gathered times; the waits by kind of group and the switch of rank 0 follow."""
WINDOW, FEWEST_STEPS = 10, 8
"""Number of steps that are compared, and the number of steps before the first check."""
CHECKS_IN_A_ROW = 3
"""Consecutive checks that must find a rank before it is reported. With a check every five steps, a
rank is reported if it is slow in about sixteen steps, at the latest after twenty slow steps."""
TRIMMED_SHARE = 0.25
"""The fractions of the fastest and of the slowest steps of the window that are ignored."""
SLOW_RATIO = 1.15
"""Compute time of a slow rank divided by its peers' time. The times of equal ranks differ by a few
percent."""
STALLED_SHARE = 0.4
"""A rank is at a standstill if it is stalled longer than its peers by this fraction of their
compute time."""
CROWDED_SHARE = 0.1
"""If peers wait for processors longer than this fraction of their compute time, the machine has too
few processors, and no single rank is the cause."""
LATE_SHARE = 0.1
"""A loader or a link is slow if its waits exceed the others' waits by this fraction of a step."""

Array = NDArray[np.float64]
Peers = Sequence[Sequence[int]]
"""Ranks that are compared with each other."""
RankTimes = Mapping[str, Array]
"""Seconds [t, r] of all ranks by part of the step:

step; work: computing (on a CPU the processor time, which other processes do not affect); stalled:
neither computing nor waiting for a rank (stopped, or blocked in a call); queued: waiting for a
processor; data: waiting for the loader; and by kind of group the waits in its collectives."""


@dataclass(frozen=True)
class Straggler:
    """Slow ranks, and the slow part of their step."""

    kind: str
    """compute, standstill, processor, loader, or the name of a kind of group: its link."""
    ranks: tuple[int, ...]
    """One rank, or all ranks of a group."""
    excess: float = field(compare=False)
    """For compute, the time divided by the peers' time; else the time minus the peers' time, in
    seconds per step."""
    peers: tuple[int, ...] = field(compare=False, default=())

    def __str__(self) -> str:
        text = {
            "compute": f"is slow: it computes {self.excess:.2f} times as long as its peers",
            "standstill": "is stopped or blocked {} than its peers",
            "processor": "waits for a processor {} than its peers",
            "loader": "has a slow loader: it waits {} than its peers",
        }.get(self.kind, f"have a slow link: {self.kind} transfers take {{}} than elsewhere")
        ranks, several = ", ".join(map(str, self.ranks)), "s" * (len(self.ranks) > 1)
        more = f"{self.excess * 1000.0:.1f} ms of a step longer"
        return f"rank{several} {ranks} {text.format(more)}"


class StragglerWatch:
    """Find stragglers in the times of all ranks.

    Args:
        stages: for each pipeline stage, its ranks.
        replicas: sets of ranks that differ only in their replica, and read equal amounts of data.
        links: kind -> for each stage, its groups of this kind.
    """

    def __init__(
        self, stages: Peers, replicas: Peers, links: Mapping[str, Sequence[Peers]]
    ) -> None:
        self.stages, self.replicas, self.links = stages, replicas, links
        self.named: list[Straggler] = []
        """The current stragglers."""
        self._times: RankTimes = {}
        self._times_found: dict[Straggler, int] = {}
        """Straggler -> number of consecutive checks that have found it."""

    def add(self, times: RankTimes) -> tuple[list[Straggler], list[Straggler]]:
        """Add the times of more steps; return new stragglers and former stragglers."""
        self._times = {
            part: np.concatenate([self._times.get(part, later[:0]), later])[-WINDOW:]
            for part, later in times.items()
        }
        found = self._find(self._times) if len(self._times["step"]) >= FEWEST_STEPS else []
        self._times_found = {f: self._times_found.get(f, 0) + 1 for f in found}
        persistent = [f for f in found if self._times_found[f] >= CHECKS_IN_A_ROW]
        begins = [f for f in persistent if f not in self.named]
        ends = [f for f in self.named if f not in found]
        self.named = persistent
        return begins, ends

    def forget(self) -> None:
        """Drop all times, after steps that were not measured."""
        self._times, self._times_found, self.named = {}, {}, []

    def _find(self, times: RankTimes) -> list[Straggler]:
        step_s = float(np.median(times["step"]))
        found: list[Straggler] = []
        for peers in _comparable(self.stages):
            work = times["work"][:, peers]
            others = median_of_others(work)
            ratio = _persistent(work / np.maximum(others, 1e-9))
            slow = ratio >= SLOW_RATIO
            found += _findings("compute", peers, slow, ratio)
            stalled = times["stalled"][:, peers]
            longer = _persistent(stalled - median_of_others(stalled))
            usual = float(np.median(others))
            found += _findings("standstill", peers, longer >= STALLED_SHARE * usual, longer)
            queued = times["queued"][:, peers]
            others = median_of_others(queued)
            longer = _persistent(queued - others)
            is_idle = _persistent(others) <= CROWDED_SHARE * usual
            crowded = is_idle & (longer >= STALLED_SHARE * usual)
            found += _findings("processor", peers, crowded, longer)
        for peers in _comparable(self.replicas):
            waits = times["data"][:, peers]
            longer = _persistent(waits - median_of_others(waits))
            found += _findings("loader", peers, longer >= LATE_SHARE * step_s, longer)
        for kind, groups_of_stages in self.links.items():
            for groups in _comparable(groups_of_stages):
                # The last rank that enters a collective waits only for the transfer.
                transfer = np.stack(
                    [times[kind][:, list(ranks)].min(axis=1) for ranks in groups], axis=1
                )
                longer = _persistent(transfer - median_of_others(transfer))
                found += [
                    Straggler(kind, tuple(groups[i]), float(longer[i]))
                    for i in np.flatnonzero(longer >= LATE_SHARE * step_s)
                ]
        return found


def median_of_others(x: Array) -> Array:
    """Return for each rank the median of the other ranks in each step: [t, n] -> [t, n]."""
    num = x.shape[1]
    ordered = np.sort(x, axis=1)
    position = np.argsort(np.argsort(x, axis=1), axis=1)

    def smallest(i: int) -> Array:
        """Return the i-th smallest value of the other ranks."""
        return np.where(position > i, ordered[:, [i]], ordered[:, [i + 1]])

    return (smallest((num - 2) // 2) + smallest((num - 1) // 2)) / 2


def slowest_and_fastest(
    work_s: Sequence[float], stages: Peers, count: int
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the `count` slowest and fastest ranks, each with its ratio to the median of its stage.

    Args:
        work_s: mean compute time of a step, by rank.
    """
    ratios: dict[int, float] = {}
    for peers in stages:
        median = float(np.median([work_s[rank] for rank in peers])) or 1.0
        ratios |= {rank: work_s[rank] / median for rank in peers}
    ordered = sorted(ratios.items(), key=lambda item: item[1])
    return ordered[::-1][:count], ordered[:count]


def _comparable(peers: Sequence[Sequence]) -> list[list]:
    return [list(each) for each in peers if len(each) > 1]


def _persistent(x: Array) -> Array:
    """Return the interquartile mean over steps: [t, n] -> [n]."""
    cut = int(TRIMMED_SHARE * len(x))
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def _findings(
    kind: str, peers: Sequence[int], slow: NDArray[np.bool_], by: Array
) -> list[Straggler]:
    return [
        Straggler(kind, (peers[i],), float(by[i]), tuple(p for p in peers if p != peers[i]))
        for i in map(int, np.flatnonzero(slow))
    ]


class LookForStragglers(Hook):
    """Gather the times of all ranks every few steps; the last rank finds and reports stragglers.

    Args:
        times: measures the steps of this rank.
        scalars: logs the times by rank, and the number of slow ranks.
        write: prints a line.
    Communication:
        every CHECK_INTERVAL steps an all-gather of a few dozen numbers over all processes; at the
        beginning an all-gather of host names.
    """

    def __init__(
        self,
        context: TrainingContext,
        times: MeasureTimes,
        scalars: Scalars,
        write: Callable[[str], None],
    ) -> None:
        self.logging, self.groups = context.run.logging, context.groups
        self.times, self.scalars, self.write = times, scalars, write
        self.looks = not self.logging.disable_straggler_on_startup
        """Whether the search is on; rank 0 decides for all ranks."""
        layout = self.groups.layout
        # Groups that were created by hand have no grid: treat all ranks as replicas.
        grid = (
            RankGrid(("dp",), (context.run.topology.world_size,))
            if layout is None
            else layout.dense
        )
        self._stages = grid.groups(*(axis for axis in grid.axes if axis != "pp"))
        links = {kind: groups_by_stage(grid, axes) for kind, axes in LINKS.items()}
        self._watch = StragglerWatch(self._stages, grid.groups("dp"), links)
        self._own_groups = {kind: tuple(grid.group_of(context.run.topology.rank, *axes))
                            for kind, axes in LINKS.items()}  # fmt: skip
        self._num_steps = 0
        self._samples: list[list[float]] = []
        self._since_report: list[np.ndarray] = []
        self._hosts: list[str] = []
        self._switch: HttpEndpoint | None = None

    def before_training(self, state: TrainState) -> TrainState:
        """Gather host names, and open the HTTP endpoint that switches the search on and off."""
        self._hosts = all_gather_object(socket.gethostname(), torch_collectives.world())
        if is_rank_0():
            try:
                self._switch = HttpEndpoint(self._toggle, port=self.logging.straggler_ctrlr_port)
            except OSError as error:
                print(f" note: --straggler-ctrlr-port {self.logging.straggler_ctrlr_port}: {error};"
                      " the search for slow ranks cannot be switched", flush=True)  # fmt: skip
        return state

    def _toggle(self) -> str:
        self.looks = not self.looks
        return f"the search for slow ranks is {'on' if self.looks else 'off'}\n"

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Store the times of the step; every CHECK_INTERVAL steps, gather and check them."""
        self._num_steps += 1
        last = self.times.last
        if self._num_steps > NUM_WARM_UP and not result.read().was_skipped and last is not None:
            self._samples.append(
                [last.step_s, last.compute_s, last.cpu_s, last.queued_s]
                + [last.communication_s, last.bubble_s, last.data_s]
                + [*(last.group_s.get(own, 0.0) for own in self._own_groups.values())]
                + [float(self.looks)]
            )
        if self._num_steps % CHECK_INTERVAL == 0 and self._samples:
            self._check(state)
        if is_last_rank() and state.iteration % self.logging.log_interval == 0:
            self._report(state)
        return state

    def _check(self, state: TrainState) -> None:
        world = torch_collectives.world()
        mine = torch.tensor(
            self._samples, dtype=torch.float64, device=torch_collectives.tensor_device(world)
        )  # [t, columns]
        of_ranks = torch_collectives.all_gather(mine, world)
        gathered = torch.stack(list(of_ranks), dim=1).cpu().numpy()  # [t, r, columns]
        self._samples = []
        if not gathered[-1, 0, -1]:
            self._watch.forget()
            self._since_report = []
            return
        if not is_last_rank():
            return
        self._since_report.append(gathered)
        begins, ends = self._watch.add(_times_of(gathered))
        for finding in begins:
            self.write(self._line(state, f"{finding}{self._where(finding)}"))
        for finding in ends:
            self.write(self._line(state, f"no longer: {finding}"))
        mean = gathered.mean(axis=0)
        self.scalars.write_by_rank(
            {f"{name}-s-by-rank": mean[:, i].tolist() for i, name in enumerate(COLUMNS)}
            | {"work-s-by-rank": mean[:, _work_column()].tolist()}
            | {"slow-ranks": sorted({rank for f in self._watch.named for rank in f.ranks})},
            state.iteration,
        )
        self.scalars.write({"num-slow-ranks": len(self._watch.named)}, state.iteration)

    def _report(self, state: TrainState) -> None:
        if not self._since_report:
            return
        work = np.concatenate(self._since_report)[:, :, _work_column()].mean(axis=0).tolist()
        self._since_report = []
        count = max(self.logging.straggler_minmax_count, 1)
        cells = []
        for name, found in zip(
            ("slowest", "fastest"), slowest_and_fastest(work, self._stages, count), strict=True
        ):
            ranks = ", ".join(f"{rank} ({work[rank] * 1e3:.1f} ms, {ratio:.2f} of its stage)"
                              for rank, ratio in found)  # fmt: skip
            cells.append(f"{name} to compute: rank {ranks}")
        self.write(self._line(state, " | ".join(cells)))

    def _line(self, state: TrainState, text: str) -> str:
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        return f" [{stamp}] stragglers at iteration {state.iteration:8d} | {text} |"

    def _where(self, finding: Straggler) -> str:
        hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in finding.ranks))
        peers = f", ranks {', '.join(map(str, finding.peers[:8]))}" if finding.peers else ""
        return f"{peers}{', ...' if len(finding.peers) > 8 else ''} | host: {hosts}"

    def close(self) -> None:
        """Close the HTTP endpoint."""
        if self._switch is not None:
            self._switch.close()


def groups_by_stage(grid: RankGrid, axes: Sequence[str]) -> list[Peers]:
    """Return, for each stage, its groups along the axes that have more than one rank."""
    by_stage: dict[int, list[list[int]]] = {}
    for ranks in grid.groups(*axes):
        if len(ranks) > 1:
            stage = grid.coordinates(ranks[0]).get("pp", 0)
            by_stage.setdefault(stage, []).append(ranks)
    return list(by_stage.values())


def _work_column() -> int:
    # On a GPU, the processor is idle while the device computes.
    return COLUMNS.index("cpu" if device.device_type() == "cpu" else "compute")


def _times_of(gathered: np.ndarray) -> RankTimes:
    column = {name: gathered[:, :, i] for i, name in enumerate(COLUMNS)}
    work = gathered[:, :, _work_column()]
    return {
        "step": column["step"],
        "work": work,
        "stalled": np.maximum(column["compute"] - work - column["queued"], 0.0),
        "queued": column["queued"],
        "data": column["data"],
        **{kind: gathered[:, :, len(COLUMNS) + i] for i, kind in enumerate(LINKS)},
    }
