"""--log-straggler: look for slow ranks, loaders and links, and report them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import datetime

import numpy as np
import torch
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
from megatron.training.metrics.stragglers import (
    Finding,
    Peers,
    RankTimes,
    StragglerWatch,
    slowest_and_fastest,
)
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import StepResult, TrainState

CHECK_INTERVAL = 5
"""Steps of which the times are gathered together."""
NUM_WARM_UP = 2
"""First steps, which allocate and compile."""
LINKS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp", "cp")}
"""Kinds of groups that are compared with others of the kind, and the axes they span."""
COLUMNS = ("step", "compute", "cpu", "queued", "communication", "bubble", "data")
"""What is gathered, before the waits by kind of group and whether rank 0 looks."""


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
        self._rows: list[list[float]] = []
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

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Keep the times of the step; gather and judge those of some steps together."""
        self._num_steps += 1
        last = self.times.last
        if self._num_steps > NUM_WARM_UP and not result.read().was_skipped and last is not None:
            self._rows.append(
                [last.step_s, last.compute_s, last.cpu_s, last.queued_s]
                + [last.communication_s, last.bubble_s, last.data_s]
                + [*(last.group_s.get(own, 0.0) for own in self._own_groups.values())]
                + [float(self.looks)]
            )
        if self._num_steps % CHECK_INTERVAL == 0 and self._rows:
            self._check(state)
        if is_last_rank() and state.iteration % self.logging.log_interval == 0:
            self._report(state)
        return state

    def _check(self, state: TrainState) -> None:
        world = torch_collectives.world()
        mine = torch.tensor(
            self._rows, dtype=torch.float64, device=torch_collectives.tensor_device(world)
        )  # [t, columns]
        gathered = _stacked(torch_collectives.all_gather(mine, world))
        self._rows = []
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

    def _where(self, finding: Finding) -> str:
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
    return RankTimes(
        step_s=column["step"],
        work_s=work,
        stalled_s=np.maximum(column["compute"] - work - column["queued"], 0.0),
        queued_s=column["queued"],
        data_s=column["data"],
        group_s={kind: gathered[:, :, len(COLUMNS) + i] for i, kind in enumerate(LINKS)},
    )
