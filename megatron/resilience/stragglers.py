"""--log-straggler: find ranks that are persistently slower than their peers, loaders and links too.

Each rank is compared, step by step, with ranks that should take as long, so that whatever slows
all of them down cancels. It is compared with the median of the others, not of all: of two ranks,
each is half of the median of all. The interquartile mean over the steps of a window counts, which
a quarter of the steps cannot move. A rank is named at the third check in a row that finds it:
other work that slows a rank for a moment does not name it.

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
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.process_groups_config import ProcessGroupCollection
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
"""Steps of which the times are gathered together."""
NUM_WARM_UP = 2
"""First steps, which allocate and compile."""
LINKS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp", "cp")}
"""Kinds of groups that are compared with others of the kind, and the axes they span."""
COLUMNS = ("step", "compute", "cpu", "queued", "communication", "bubble", "data")
"""The gathered times, before the waits by kind of group and whether rank 0 looks."""
WINDOW, FEWEST_STEPS = 10, 8
"""Steps that are compared, and the number of them before any rank is named."""
CHECKS_IN_A_ROW = 3
"""Checks that must find a rank before it is named. With a check every five steps this takes a rank
that is slow in about sixteen of them, and names one that stays so within twenty."""
TRIMMED_SHARE = 0.25
"""Share of the fastest steps of the window, and of the slowest, that do not count."""
SLOW_RATIO = 1.15
"""Compute time of a slow rank over its peers' time. The times of equal ranks differ by a few
percent."""
STALLED_SHARE = 0.4
"""A rank stands still if it does so longer than its peers, by this share of their compute."""
CROWDED_SHARE = 0.1
"""If peers wait for processors longer than this share of their compute, there are too few for all,
and the rank that waits longest is chance."""
LATE_SHARE = 0.1
"""A loader or a link is slow if waits for it are longer than elsewhere by this share of a step."""

Array = NDArray[np.float64]
Peers = Sequence[Sequence[int]]
"""Ranks that are compared with each other."""
RankTimes = Mapping[str, Array]
"""Seconds [t, r] of all ranks by part of the step:

step; work: computing (processor time on a CPU, which other processes there do not lengthen);
stalled: neither computing nor waiting for a rank (stopped, or blocked in a call); queued: waiting
for a processor; data: waiting for the loader; and by kind of group the waits in its collectives."""


@dataclass(frozen=True)
class Straggler:
    """Ranks that are slow, and the part of the step in which they are."""

    kind: str
    """compute, standstill, processor, loader, or the name of a kind of group: its link."""
    ranks: tuple[int, ...]
    """One, or all of a group."""
    excess: float = field(compare=False)
    """Of compute the ratio to the peers; else seconds of a step more than those of the peers."""
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
    """Judges times as they come.

    Args:
        stages: ranks of the same stage of the pipeline.
        replicas: ranks that differ in nothing but their replica, and read as much data.
        links: kind -> groups of that kind in one stage, for each stage.
    """

    def __init__(
        self, stages: Peers, replicas: Peers, links: Mapping[str, Sequence[Peers]]
    ) -> None:
        self.stages, self.replicas, self.links = stages, replicas, links
        self.named: list[Straggler] = []
        """The ranks that are slow now."""
        self._times: RankTimes = {}
        self._times_found: dict[Straggler, int] = {}
        """In so many checks in a row."""

    def add(self, times: RankTimes) -> tuple[list[Straggler], list[Straggler]]:
        """Add the times of more steps; return new stragglers, and those that are none any more."""
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
        """Begin anew, after steps that were not measured."""
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
                # The last rank to enter a collective waits for the bytes alone.
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
    """Return for each column the median of the other columns, row by row: [t, n] -> [t, n]."""
    num = x.shape[1]
    ordered = np.sort(x, axis=1)
    position = np.argsort(np.argsort(x, axis=1), axis=1)

    def smallest(i: int) -> Array:
        """The i-th smallest of the others."""
        return np.where(position > i, ordered[:, [i]], ordered[:, [i + 1]])

    return (smallest((num - 2) // 2) + smallest((num - 1) // 2)) / 2


def slowest_and_fastest(
    work_s: Sequence[float], stages: Peers, count: int
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the `count` slowest and fastest ranks, each with its ratio to the median of its stage.

    Args:
        work_s: mean compute of a step, by rank.
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
    """[t, n] -> [n]: the mean of the middle half of the steps."""
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
    """Gathers the times of all ranks every few steps; the last rank judges them and reports.

    Args:
        times: measures the steps of this rank.
        scalars: takes the times by rank, and the number of slow ranks.
        write: prints a line.
    Communication:
        every CHECK_INTERVAL steps an all-gather of some dozen numbers over all processes; at the
        beginning one of the names of the machines.
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
        """Of rank 0, whose word counts for all."""
        grid = _grid_of(self.groups, context.run.topology.world_size)
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
        """Learn the names of the machines, and listen for who wants to switch."""
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
        """Keep the times of the step; gather and judge those of some steps together."""
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
        gathered = _stacked(torch_collectives.all_gather(mine, world))
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
        """Stop listening."""
        if self._switch is not None:
            self._switch.close()


def _grid_of(groups: ProcessGroupCollection, world_size: int) -> RankGrid:
    """Return the dense grid; groups that were made by hand have none: all ranks are replicas."""
    layout = groups.layout
    return RankGrid(("dp",), (world_size,)) if layout is None else layout.dense


def groups_by_stage(grid: RankGrid, axes: Sequence[str]) -> list[Peers]:
    """Return, for each stage, its groups along the axes, where they have more than one rank."""
    by_stage: dict[int, list[list[int]]] = {}
    for ranks in grid.groups(*axes):
        if len(ranks) > 1:
            stage = grid.coordinates(ranks[0]).get("pp", 0)
            by_stage.setdefault(stage, []).append(ranks)
    return list(by_stage.values())


def _stacked(of_ranks: Sequence[Tensor]) -> np.ndarray:
    return torch.stack(list(of_ranks), dim=1).cpu().numpy()  # [t, r, columns]


def _work_column() -> int:
    # A device computes while the processor does nothing.
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
