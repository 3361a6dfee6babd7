"""The ranks that hold replicas of a model, and their gathers, sums and broadcasts.

The sum of an element is computed in rank order (`transport.transport`), so it depends neither on
its bucket nor on whether the state is sharded: every ZeRO stage computes the same bits.
Half-precision gradients are added in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from megatron.core.dist_checkpointing.collective import as_checkpoint_error
from megatron.core.foundation.errors import MegatronError
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import raise_on_all_ranks
from megatron.core.transport.transport import bucket_transport, has_tags, piece_of
from megatron.core.transport.work import Work

Result = TypeVar("Result")
SUM_TAG = (1 << 31) - 1
"""Message tag of `sum_in_place`; no bucket has it."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks that hold copies of the same weights, as a grid of two axes.

    Plain data parallelism has no `shard` axis; ZeRO over all ranks has no `replicate` axis; with
    both, state is sharded inside and copied across (HSDP).
    """

    shard: Group
    replicate: Group

    @property
    def shard_size(self) -> int:
        """Number of shards of the state."""
        return self.shard.size()

    @property
    def shard_rank(self) -> int:
        """Which shard this rank owns."""
        return self.shard.rank()

    @property
    def replicate_size(self) -> int:
        """Copies of each shard."""
        return self.replicate.size()

    @property
    def size(self) -> int:
        """Ranks that hold copies of the weights."""
        return self.shard_size * self.replicate_size

    def agreed(self, problem: MegatronError | None) -> MegatronError | None:
        """Return a problem that any rank of the mesh has; None if no rank has one.

        Communication: see `raise_on_all_ranks`, on both axes.
        """
        for group in (self.shard, self.replicate):
            try:
                raise_on_all_ranks(problem, group)
            except MegatronError as error:
                problem = error  # the ranks of the other axis raise it, too
        return problem

    def own(self, bucket: Tensor) -> Tensor:
        """Return this rank's shard [n/dp] of a bucket [n], as a view."""
        return piece_of(bucket, self.shard_rank, self.shard_size)


UNSHARDED = Mesh(shard=SINGLE_RANK, replicate=SINGLE_RANK)
"""One rank holds the weights."""


def gather_on_all_ranks(step: Callable[[], Result], meshes: Sequence[Mesh]) -> Result:
    """Call `step`, which gathers parameters, on all ranks of the meshes; return its result.

    Raises:
        CheckpointError: on all ranks, if one of them fails, for example out of memory.
    Communication: see `Mesh.agreed`.
    """
    problem: MegatronError | None = None
    result: Any = None
    try:
        result = step()
    except Exception as error:
        problem = as_checkpoint_error(error, "gathering parameters")
    for mesh in meshes:
        problem = mesh.agreed(problem)
    if problem is not None:
        raise problem
    return result


def gather_parameters(
    bucket: Tensor, mesh: Mesh, *, tag: int, shard: Tensor | None = None
) -> Work[Tensor]:
    """Fill a bucket with the shards of all ranks of `mesh.shard`.

    Args:
        bucket: [n].
        shard: [n / size], this rank's contribution; None is `mesh.own(bucket)`.
    """
    if mesh.shard_size > 1:
        transport = bucket_transport(mesh.shard, tag, is_in_order=True)
        return transport.all_gather(mesh.own(bucket) if shard is None else shard, out=bucket)
    if shard is not None:
        bucket.copy_(shard)
    return Work.completed(bucket)


def sum_in_place(flat: Tensor, group: Group) -> None:
    """Sum a flat tensor [n] over a group, in place; on gloo in rank order, equal on all ranks."""
    if group.size() == 1:
        return
    if flat.numel() % group.size() or not has_tags(group):
        torch_collectives.all_reduce(flat, group)
        return
    bucket_transport(group, SUM_TAG, is_in_order=True).all_reduce(flat).wait()


def broadcast_from_first(copies: Sequence[tuple[Tensor, Group]]) -> None:
    """Overwrite each tensor by the tensor of the first rank of its group."""
    for work in [torch_collectives.start_broadcast(tensor, group) for tensor, group in copies]:
        work.wait()
