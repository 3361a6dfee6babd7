"""Topology as arithmetic: the ranks of each group. Pure integers, no torch.

A grid is an n-dimensional arrangement of consecutive ranks. The first axis varies fastest: with
the order "tp-cp-ep-dp-pp", tensor-parallel neighbours have adjacent ranks and pipeline stages
are farthest apart. Experts use a second grid over the same ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

from megatron.core.foundation.errors import TopologyError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class RankGrid:
    """An arrangement of ranks offset ... offset + world_size - 1.

    axes: names, fastest varying first; sizes: extent of each.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise TopologyError(
                f"grid axes {self.axes} do not match sizes {self.sizes}.",
                rule="each axis is named once and has one size",
            )
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if size < 1:
                raise TopologyError(
                    f"axis {axis} has size {size}.", rule="every parallel size is at least 1"
                )

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Extent of one axis; an absent axis has extent 1."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis."""
        rest, found = rank - self.offset, {}
        assert 0 <= rest < self.world_size, (rank, self)
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rest, found[axis] = divmod(rest, size)
        return found

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at a position; axes left out are at 0."""
        rank, step = self.offset, 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank += step * coordinates.get(axis, 0)
            step *= size
        return rank

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that differ from `rank` only on `axes`, in ascending order."""
        here = self.coordinates(rank)
        first = self.rank_at({axis: 0 if axis in axes else n for axis, n in here.items()})
        return [first + distance for distance in self._distances(axes)]

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups along `axes`; together they hold each rank once."""
        outside = [axis for axis in self.axes if axis not in axes]
        inside = self._distances(axes)
        return [
            [self.offset + first + distance for distance in inside]
            for first in self._distances(outside)
        ]

    def _distances(self, axes: Sequence[str]) -> list[int]:
        """Return the distances of the ranks along `axes` from the first of them, ascending."""
        steps = accumulate(self.sizes, mul, initial=1)
        found = [0]
        for axis, size, step in zip(self.axes, self.sizes, steps, strict=False):
            if axis in axes:
                found = [step * n + before for n in range(size) for before in found]
        return found


@dataclass(frozen=True)
class Layout:
    """Both grids of a run: `dense` for attention and MLP, `expert` for routed experts."""

    dense: RankGrid
    expert: RankGrid

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dense.world_size


def parse_order(order: str) -> list[str]:
    """Split an order string such as "tp-cp-ep-dp-pp"; an axis left out has size 1, at the end."""
    axes = order.lower().split("-")
    known = DEFAULT_ORDER.split("-")
    unknown = [axis for axis in axes if axis not in known]
    if unknown or len(set(axes)) != len(axes):
        raise TopologyError(
            f"rank order {order!r} is not understood.",
            rule="an order names each of tp, cp, ep, dp, pp at most once, joined by '-'",
            fix=f"use {DEFAULT_ORDER!r}",
        )
    return axes + [axis for axis in known if axis not in axes]


def plan_layout(
    world_size: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
    order: str = DEFAULT_ORDER,
    rank_offset: int = 0,
) -> Layout:
    """Arrange `world_size` ranks; the data-parallel size is what remains.

    Dense grid: dp = world / (tp * pp * cp). Expert grid: the same order without cp,
    expert_dp = world / (expert_tp * ep * pp).

    Raises:
        TopologyError: a product of sizes does not divide the world size, or the pipeline axes of
            the two grids would not coincide.
    """
    axes = parse_order(order)
    expert_tp = tp if expert_tp is None else expert_tp
    flags = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "cp": "--context-parallel-size",
    }
    model = tp * pp * cp
    if min(tp, pp, cp, ep, expert_tp) < 1 or world_size % model:
        raise TopologyError(
            f"{world_size} ranks cannot be arranged as tp={tp} x pp={pp} x cp={cp} x dp=?.",
            rule="the number of ranks is a multiple of tp * pp * cp",
            flags=list(flags.values()),
            fix=f"start {_nearest_multiple(world_size, model)} ranks, or use smaller sizes",
        )
    if world_size % (expert_tp * ep * pp):
        raise TopologyError(
            f"{world_size} ranks cannot be arranged as expert-tp={expert_tp} x ep={ep} x pp={pp}"
            " x expert-dp=?.",
            rule="the number of ranks is a multiple of expert_tp * ep * pp",
            flags=["--expert-model-parallel-size", "--expert-tensor-parallel-size"],
            fix="choose an expert-parallel size that divides world / (expert_tp * pp)",
        )
    dense_sizes = {"tp": tp, "cp": cp, "ep": 1, "dp": world_size // model, "pp": pp}
    expert_sizes = {
        "tp": expert_tp, "cp": 1, "ep": ep, "dp": world_size // (expert_tp * ep * pp), "pp": pp,
    }  # fmt: skip
    dense = _grid(axes, dense_sizes, rank_offset)
    expert = _grid(axes, expert_sizes, rank_offset)
    if dense.groups("pp") != expert.groups("pp"):
        raise TopologyError(
            f"with order {order!r} the experts' pipeline stages hold other ranks than the dense"
            " ones.",
            rule="both grids must agree on the pipeline axis",
            flags=[
                "--use-tp-pp-dp-mapping",
                "--expert-tensor-parallel-size",
                "--context-parallel-size",
            ],
            fix="leave out --use-tp-pp-dp-mapping (pp is last in the order), or use "
            f"--expert-tensor-parallel-size {tp} and --context-parallel-size 1",
        )
    return Layout(dense, expert)


def _grid(axes: Sequence[str], sizes: Mapping[str, int], offset: int) -> RankGrid:
    return RankGrid(tuple(axes), tuple(sizes[axis] for axis in axes), offset)


def _nearest_multiple(world_size: int, model: int) -> int:
    return max(model, world_size // max(model, 1) * model) if model > 0 else 1


def nested_sizes(num_ranks: int) -> list[int]:
    """Return sizes of groups of neighbours; each size divides the next one: 1, 2, 4, ...

    Odd factors are last: 1, 2, 4, 12 of 12 ranks.
    """
    sizes, rest = [1], num_ranks
    while rest > 1:
        factor = next(f for f in range(2, rest + 1) if rest % f == 0)
        sizes.append(sizes[-1] * factor)
        rest //= factor
    return sizes
