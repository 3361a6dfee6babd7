"""The process groups of this rank, as one value that is passed around.

`build_process_groups(layout)` turns grid arithmetic into torch.distributed groups. Mechanisms
take a `ProcessGroupCollection`, or single groups of it; an axis that does not exist is
`SINGLE_RANK`: size 1, rank 0, no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch.distributed as dist

from megatron.core.foundation.device import settle_backends, wait_for_backends_at_exit
from megatron.core.foundation.errors import TopologyError
from megatron.core.step_context.context import current_step
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.topology.rank_grid import Layout, nested_sizes
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object


@dataclass(kw_only=True)
class ProcessGroupCollection:
    """All groups that one rank belongs to. Names are Megatron's."""

    tp: Group = SINGLE_RANK
    """Tensor parallel."""
    pp: Group = SINGLE_RANK
    """Pipeline parallel, in stage order."""
    cp: Group = SINGLE_RANK
    """Context parallel."""
    dp: Group = SINGLE_RANK
    """Data parallel, without context parallel."""
    mp: Group = SINGLE_RANK
    """Model parallel: tp x pp (one replica's ranks at equal cp): the group of the grad norm."""
    tp_cp: Group = SINGLE_RANK
    tp_dp: Group = SINGLE_RANK
    tp_dp_cp: Group = SINGLE_RANK
    dp_cp: Group = SINGLE_RANK
    """Ranks that hold the same dense weights: gradients are reduced over it."""
    embd: Group = SINGLE_RANK
    """First and last stage, which hold the tied embedding."""
    pos_embd: Group = SINGLE_RANK
    """Stages that hold position embeddings."""
    ep: Group = SINGLE_RANK
    """Expert parallel."""
    expt_tp: Group = SINGLE_RANK
    """Tensor parallel inside experts."""
    tp_ep: Group = SINGLE_RANK
    tp_ep_pp: Group = SINGLE_RANK
    """Expert-tp x ep x pp: the model-parallel group of expert weights."""
    expt_dp: Group = SINGLE_RANK
    """Ranks that hold the same expert weights."""
    intra_dp_cp: Group = SINGLE_RANK
    """Part of dp_cp inside which optimizer state is sharded; dp_cp itself with one instance."""
    intra_expt_dp: Group = SINGLE_RANK
    inter_dist_opt: Group = SINGLE_RANK
    """Replicas of the sharded optimizer."""
    intra_dist_opt: Group = SINGLE_RANK
    hcp: tuple[Group, ...] = ()
    """Levels of hierarchical context parallelism, innermost first; none without it."""
    hybrid_cp: Mapping[int, Group] = field(default_factory=dict)
    """Neighbours of dp_cp that may split a micro batch, by their number (dynamic context
    parallelism, `megatron.core.datasets.packing`); empty if `cp` splits all micro batches."""
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """Global ranks of each group above, for messages and point-to-point addressing."""
    layout: Layout | None = None
    """The layout that these groups were built from."""

    _current: ClassVar[RunProcessGroups | None] = None

    def __post_init__(self) -> None:
        """Replace None, the mark of third parties for absent axes, by `SINGLE_RANK`."""
        for known in fields(self):
            if known.default is SINGLE_RANK and getattr(self, known.name) is None:
                setattr(self, known.name, SINGLE_RANK)

    @property
    def microbatch_cp(self) -> Group:
        """The ranks that split the running micro batch: `cp`, or its dynamic group."""
        return current_step().cp_group or self.cp

    @classmethod
    def current(cls) -> RunProcessGroups:
        """Return the groups of this process, which are used if no groups are passed.

        Without `set_current` there is one rank on every axis.
        """
        return ProcessGroupCollection._current or _NO_GROUPS

    @classmethod
    def set_current(cls, collection: ProcessGroupCollection | None) -> None:
        """Make a copy of `collection` the default of this process; None removes the default."""
        ProcessGroupCollection._current = None if collection is None else collection.frozen()

    @classmethod
    def single(cls) -> ProcessGroupCollection:
        """A collection whose axes all have size 1."""
        return cls()

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return a copy of the current collection, limited to the groups in `required_pgs`."""
        collection = cls.current()
        names = {f.name for f in fields(ProcessGroupCollection)}
        wanted = list(names if required_pgs is None else required_pgs)
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise TopologyError(
                f"unknown process groups {unknown}.",
                rule=f"known are {', '.join(sorted(names))}",
                fix="name groups of this list in required_pgs",
            )
        return cls(**{name: getattr(collection, name) for name in {*wanted, "ranks", "layout"}})

    def with_groups(self, **groups: Any) -> Self:
        """Return a copy with some groups replaced."""
        return replace(self, **groups)

    def frozen(self) -> RunProcessGroups:
        """Return these groups as the immutable collection of a run."""
        if isinstance(self, RunProcessGroups):
            return self
        groups = RunProcessGroups()
        vars(groups).update(vars(self))  # with what others have added to it
        return groups


@dataclass(kw_only=True)
class RunProcessGroups(ProcessGroupCollection):
    """The groups of a run, immutable once they are made."""

    factory: GroupFactory | None = None
    """The factory that `initialize_model_parallel` used."""
    virtual_pipeline_size: int | None = None
    """Model chunks of this rank, declared by callers; None without virtual stages."""
    virtual_pipeline_rank: int | None = None
    """The current chunk, declared by callers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["_is_complete"] = True

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute during construction, and raise afterwards."""
        if "_is_complete" in self.__dict__:
            raise TopologyError(
                f"{name!r} of the process groups of a run was to be changed.",
                rule="all parts of a run share one collection of groups, which never changes",
                fix=f"make another one: groups.with_groups({name}=...)",
            )
        super().__setattr__(name, value)

    def virtual_stage(self, vp_stage: int | None = None) -> tuple[int | None, int]:
        """Return the number of `vp_stage` (or of the declared chunk), and the number of chunks."""
        if self.virtual_pipeline_size is None:
            return 0, 1
        stage = self.virtual_pipeline_rank if vp_stage is None else vp_stage
        return stage, self.virtual_pipeline_size


_NO_GROUPS = RunProcessGroups()


def resolve_groups(pg_collection: ProcessGroupCollection | None) -> RunProcessGroups:
    """Return the groups passed to a public constructor; None is the groups of this process."""
    return ProcessGroupCollection.current() if pg_collection is None else pg_collection.frozen()


def resolve_group(
    group: Group | None, axis: str, pg_collection: ProcessGroupCollection | None = None
) -> Group:
    """Return the group passed to a public function, or the group of `axis` in its collection."""
    found: Group = getattr(resolve_groups(pg_collection), axis) if group is None else group
    return found


class GroupFactory:
    """Creates each distinct group once: axes of equal ranks share a communicator.

    Every process of the world creates the same groups in the same order, also groups without this
    process: torch names a group by the number of groups created before, so all members use the same
    name, and names never repeat, also after `destroy`. (If only members create a group, torch names
    it by the number of living groups. A first and a middle pipeline stage count differently, and
    when the count falls, a new group finds the stale rendezvous of an older group.) A group without
    this process costs about 10 us: 16,192 groups of 16,384 ranks take 0.2 s.
    """

    def __init__(self, backend: str | None = None, timeout: timedelta | None = None) -> None:
        self.backend = backend
        self.timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def create(self, rank_lists: Iterable[Sequence[int]], name: str) -> Group:
        """Create the groups of `rank_lists` and return the one that this process belongs to.

        Args:
            rank_lists: global ranks of each group; no rank is in two of them.
            name: for messages of torch.
        Returns:
            `SINGLE_RANK` if this process is in none of them.
        Communication:
            collective on the world; a rendezvous among the members of each new group.
        """
        wait_for_backends_at_exit()
        rank = dist.get_rank()
        mine: Group = SINGLE_RANK
        for ranks in map(tuple, rank_lists):
            if ranks not in self._made:
                group = dist.new_group(
                    list(ranks), backend=self.backend, timeout=self.timeout, group_desc=name
                )
                self._made[ranks] = group if rank in ranks else None
            made = self._made[ranks]
            mine = mine if made is None else made
        return mine

    def destroy(self) -> None:
        """Destroy every group this factory created."""
        settle_backends()
        for group in self._made.values():
            if group is not None:
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
RankLists = list[list[int]]
"""The ranks of each group of one kind."""


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
    hybrid_context_parallel: bool = False,
    num_distributed_optimizer_instances: int = 1,
    virtual_pipeline_size: int | None = None,
) -> RunProcessGroups:
    """Create the groups of this rank. torch.distributed must be initialised.

    Args:
        embedding_ranks, position_embedding_ranks: return, from the ranks of a pipeline group, the
            ranks that hold the tied word embedding or the position embedding.
        hybrid_context_parallel: also groups of neighbours of dp_cp that may split a micro batch.
        num_distributed_optimizer_instances: number of replicas of the sharded optimizer state;
            dp_cp is cut into as many pieces.
        virtual_pipeline_size: model chunks per pipeline rank; None without virtual stages.
    Raises:
        TopologyError: the replicas of the weights cannot be cut into that many instances.
    Communication:
        collective on the world, see `GroupFactory`. Where the layout covers only a part of the
        world, the processes outside call this too, with their own layout, and one all-gather of
        rank lists precedes.
    """
    factory = factory or GroupFactory()
    rank = dist.get_rank()
    plan: dict[str, RankLists] = {n: layout.dense.groups(*a) for n, a in DENSE_GROUPS.items()}
    plan |= {n: layout.expert.groups(*axes) for n, axes in EXPERT_GROUPS.items()}
    plan["embd"] = [embedding_ranks(stages) for stages in plan["pp"]]
    plan["pos_embd"] = [position_embedding_ranks(stages) for stages in plan["pp"]]
    instances = num_distributed_optimizer_instances
    plan["intra_dp_cp"] = _pieces(plan["dp_cp"], instances)
    plan["intra_expt_dp"] = _pieces(plan["expt_dp"], instances)
    if instances > 1:
        plan["inter_dist_opt"] = _across_pieces(plan["dp_cp"], instances)
    num_levels = 0
    if hierarchical_context_parallel_sizes:
        levels = _hierarchy(plan["cp"], hierarchical_context_parallel_sizes)
        plan |= {f"hcp_{level}": rank_lists for level, rank_lists in enumerate(levels)}
        num_levels = len(levels)

    hybrid_sizes = nested_sizes(len(plan["dp_cp"][0])) if hybrid_context_parallel else []
    for size in hybrid_sizes:
        plan[f"hybrid_cp_{size}"] = _pieces(plan["dp_cp"], len(plan["dp_cp"][0]) // size)

    _create_plans_of_other_layouts(plan, layout, factory)
    groups: dict[str, Any] = {n: factory.create(lists, n) for n, lists in plan.items()}
    members = {n: ranks for n, lists in plan.items() for ranks in lists if rank in ranks}
    if num_levels:
        groups["hcp"] = tuple(groups.pop(f"hcp_{level}") for level in range(num_levels))
        for level in range(num_levels):
            members.pop(f"hcp_{level}", None)
    groups["hybrid_cp"] = {s: groups.pop(f"hybrid_cp_{s}") for s in hybrid_sizes}
    return RunProcessGroups(
        **groups,
        ranks=members,
        layout=layout,
        factory=factory,
        virtual_pipeline_size=virtual_pipeline_size,
        virtual_pipeline_rank=None if virtual_pipeline_size is None else 0,
    )


def _create_plans_of_other_layouts(
    plan: Mapping[str, RankLists], layout: Layout, factory: GroupFactory
) -> None:
    """If several layouts share the world, create the groups of all layouts in a common order."""
    if layout.world_size == dist.get_world_size():
        return
    plans: list[Mapping[str, RankLists]] = all_gather_object(plan, torch_collectives.world())
    for other in plans:
        for name, rank_lists in other.items():
            factory.create(rank_lists, name)


def _pieces(rank_lists: RankLists, parts: int) -> RankLists:
    """Cut every list into `parts` consecutive pieces."""
    length, rest = divmod(len(rank_lists[0]), parts)
    if rest:
        raise TopologyError(
            f"{len(rank_lists[0])} replicas of the weights cannot be cut into {parts} instances"
            " of the distributed optimizer.",
            rule="the number of instances divides the data-parallel size (with context parallel)",
            flags=["--num-distributed-optimizer-instances"],
            fix="use 1 instance",
        )
    return [ranks[i : i + length] for ranks in rank_lists for i in range(0, len(ranks), length)]


def _across_pieces(rank_lists: RankLists, parts: int) -> RankLists:
    """Join the ranks that have the same place in each of the `parts` pieces."""
    return [
        ranks[place :: len(ranks) // parts]
        for ranks in rank_lists
        for place in range(len(ranks) // parts)
    ]


def _hierarchy(rank_lists: RankLists, sizes: Sequence[int]) -> list[RankLists]:
    """Cut context-parallel groups into nested levels, innermost first."""
    levels, step = [], 1
    for size in sizes:
        block = step * size
        levels.append(
            [
                ranks[first + inner : first + block : step]
                for ranks in rank_lists
                for first in range(0, len(ranks), block)
                for inner in range(step)
            ]
        )
        step = block
    return levels
