"""The process groups of this rank, as one value that is passed around.

`build_process_groups(layout)` turns grid arithmetic into torch.distributed groups. Mechanisms
take a `ProcessGroupCollection`, or single groups of it; an axis that does not exist is None,
which everywhere means size 1, rank 0, no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from megatron.core.rank_grid import Layout

Group = Any
"""A torch.distributed.ProcessGroup, or anything with `size()` and `rank()`; None is size 1."""


@dataclass(frozen=True)
class FakeGroup:
    """A place on an axis without processes: for tests of pure arithmetic and layer shapes."""

    group_rank: int
    group_size: int

    def rank(self) -> int:
        """This rank's position in the group."""
        return self.group_rank

    def size(self) -> int:
        """Number of ranks in the group."""
        return self.group_size


@dataclass(kw_only=True)
class ProcessGroupCollection:
    """All groups that one rank belongs to. Names are Megatron's."""

    tp: Group = None
    """Tensor parallel."""
    pp: Group = None
    """Pipeline parallel, in stage order."""
    cp: Group = None
    """Context parallel."""
    dp: Group = None
    """Data parallel, without context parallel."""
    mp: Group = None
    """Model parallel: tp x pp (one replica's ranks at equal cp): the group of the grad norm."""
    tp_cp: Group = None
    tp_dp: Group = None
    tp_dp_cp: Group = None
    dp_cp: Group = None
    """Ranks that hold the same dense weights: gradients are reduced over it."""
    embd: Group = None
    """First and last stage (those that hold the tied embedding); None elsewhere."""
    pos_embd: Group = None
    """Stages that hold position embeddings."""
    ep: Group = None
    """Expert parallel."""
    expt_tp: Group = None
    """Tensor parallel inside experts."""
    tp_ep: Group = None
    tp_ep_pp: Group = None
    """Expert-tp x ep x pp: the model-parallel group of expert weights."""
    expt_dp: Group = None
    """Ranks that hold the same expert weights."""
    intra_dp_cp: Group = None
    """Part of dp_cp inside which optimizer state is sharded; dp_cp itself by default."""
    intra_expt_dp: Group = None
    inter_dist_opt: Group = None
    """Replicas of the sharded optimizer; None with one instance."""
    intra_dist_opt: Group = None
    hcp: list[Group] | None = None
    """Levels of hierarchical context parallelism."""
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """Global ranks of each group above, for messages and point-to-point addressing."""
    layout: Layout | None = None
    """The arithmetic these groups were built from."""

    _current: ClassVar[ProcessGroupCollection | None] = None

    @classmethod
    def current(cls) -> ProcessGroupCollection:
        """Return the collection of this process: the fallback where none is passed.

        Without `set_current` that is the empty collection: one rank on every axis.
        """
        if ProcessGroupCollection._current is None:
            return cls.single()
        return ProcessGroupCollection._current

    @classmethod
    def set_current(cls, collection: ProcessGroupCollection | None) -> None:
        """Make `collection` the fallback of this process; None forgets it."""
        ProcessGroupCollection._current = collection

    @classmethod
    def single(cls) -> ProcessGroupCollection:
        """A collection in which every axis has size 1."""
        return cls()

    @classmethod
    def fake(cls, **places: tuple[int, int]) -> ProcessGroupCollection:
        """Build a collection without processes: fake(tp=(rank, size), pp=(0, 2))."""
        groups: dict[str, Any] = {axis: FakeGroup(*place) for axis, place in places.items()}
        return cls(**groups)

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return the current collection, limited to the groups named in `required_pgs`."""
        collection = cls.current()
        if required_pgs is None:
            return collection
        names = {f.name for f in fields(cls)}
        unknown = [name for name in required_pgs if name not in names]
        assert not unknown, f"unknown process groups {unknown}; known are {sorted(names)}"
        return cls(
            **{name: getattr(collection, name) for name in required_pgs},
            ranks=collection.ranks,
            layout=collection.layout,
        )

    def with_groups(self, **groups: Group) -> ProcessGroupCollection:
        """Return a copy with some groups replaced."""
        return replace(self, **groups)


class GroupFactory:
    """Creates each distinct group once: axes of equal ranks share a communicator.

    All ranks must ask for the same groups in the same order.
    """

    def __init__(self, backend: str | None = None, timeout: timedelta | None = None) -> None:
        self.backend = backend
        self.timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def create(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """Return the group of `ranks`, to which this process belongs.

        Only members take part in the creation, so the cost does not grow with the world size.
        """
        key = tuple(ranks)
        if key not in self._made:
            self._made[key] = dist.new_group(
                list(ranks),
                backend=self.backend,
                timeout=self.timeout,
                use_local_synchronization=True,
                group_desc=name,
            )
        return self._made[key]

    def destroy(self) -> None:
        """Destroy every group this factory created."""
        for group in self._made.values():
            dist.destroy_process_group(group)
        self._made.clear()


DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",), "pp": ("pp",), "cp": ("cp",), "dp": ("dp",), "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"), "tp_dp": ("tp", "dp"), "tp_dp_cp": ("tp", "dp", "cp"),
    "dp_cp": ("dp", "cp"),
}  # fmt: skip
"""Group name -> axes of the dense grid it spans."""

EXPERT_GROUPS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",), "expt_tp": ("tp",), "tp_ep": ("tp", "ep"), "tp_ep_pp": ("tp", "ep", "pp"),
    "expt_dp": ("dp",),
}  # fmt: skip
"""Group name -> axes of the expert grid it spans."""

StageRanks = Callable[..., list[int]]


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """First and last stage: the holders of a tied embedding."""
    return pp_ranks[:1] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """First stage only."""
    return pp_ranks[:1]


def build_process_groups(
    layout: Layout,
    *,
    factory: GroupFactory | None = None,
    embedding_ranks: StageRanks = default_embedding_ranks,
    position_embedding_ranks: StageRanks = default_position_embedding_ranks,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    num_distributed_optimizer_instances: int = 1,
) -> ProcessGroupCollection:
    """Create the groups of this rank. torch.distributed must be initialised.

    Args:
        embedding_ranks, position_embedding_ranks: pick, from the ranks of a pipeline group, those
            that hold the tied word embedding or the position embedding.
        num_distributed_optimizer_instances: into how many replicas dp_cp is cut for sharded
            optimizer state.
    Communication:
        group creation among the members of each group.
    """
    factory = factory or GroupFactory()
    rank = dist.get_rank()
    members = {n: layout.dense.group_of(rank, *axes) for n, axes in DENSE_GROUPS.items()}
    members |= {n: layout.expert.group_of(rank, *axes) for n, axes in EXPERT_GROUPS.items()}
    for name, choose in (("embd", embedding_ranks), ("pos_embd", position_embedding_ranks)):
        chosen = choose(members["pp"])
        if rank in chosen:
            members[name] = chosen
    groups: dict[str, Any] = {n: factory.create(ranks, n) for n, ranks in members.items()}

    instances = num_distributed_optimizer_instances
    members["intra_dp_cp"] = _nth_part(members["dp_cp"], rank, instances)
    members["intra_expt_dp"] = _nth_part(members["expt_dp"], rank, instances)
    groups["intra_dp_cp"] = factory.create(members["intra_dp_cp"], "intra_dp_cp")
    groups["intra_expt_dp"] = factory.create(members["intra_expt_dp"], "intra_expt_dp")
    if instances > 1:
        inner = len(members["intra_dp_cp"])
        place = members["dp_cp"].index(rank) % inner
        members["inter_dist_opt"] = members["dp_cp"][place::inner]
        groups["inter_dist_opt"] = factory.create(members["inter_dist_opt"], "inter_dist_opt")
    if hierarchical_context_parallel_sizes:
        groups["hcp"] = _hierarchy(
            members["cp"], rank, hierarchical_context_parallel_sizes, factory
        )
    return ProcessGroupCollection(**groups, ranks=members, layout=layout)


def _nth_part(ranks: list[int], rank: int, parts: int) -> list[int]:
    """Return the one of `parts` consecutive pieces of `ranks` that holds `rank`."""
    length = len(ranks) // parts
    start = ranks.index(rank) // length * length
    return ranks[start : start + length]


def _hierarchy(
    ranks: list[int], rank: int, sizes: Sequence[int], factory: GroupFactory
) -> list[Group]:
    """Cut a context-parallel group into nested levels, innermost first."""
    levels, step, place = [], 1, ranks.index(rank)
    for size in sizes:
        first = place - place // step % size * step
        levels.append(factory.create([ranks[first + i * step] for i in range(size)], "hcp"))
        step *= size
    return levels
