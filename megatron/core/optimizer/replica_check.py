"""Find ranks whose copies of weights, gradients or optimizer state are not equal to the bit.

Replicas see the same reduced gradients and compute the same updates, so what they hold stays equal
to the bit; a difference is a fault of the hardware, of a driver or of the program. Nothing else
tells of it: a wrong bit in one replica changes the gradients of all (H. Dixit et al., "Silent Data
Corruptions at Scale", arXiv 2102.11245).

Tensors are not exchanged but digests of them, one integer each. Compared are

- the reduced gradients, weights and their fp32 copies and moments over the ranks that hold them
  whole: data-parallel replicas, or where they are sharded the copies of each shard;
- what is not split over tensor-parallel ranks over those (norms, routers, positions);
- the copies of a tied embedding over its pipeline stages.

At an interval everything is compared. In between, what an update overwrites (gradients, and weights
that have a copy in fp32) leaves no trace but in the losses of all replicas. So before every update
the digests of gradients and weights are added up on each rank, without a message, and the sums are
compared at the interval; the norm of the gradient is compared in every step, so that replicas
never decide differently about an update.

A part of sharded state that exists once has nothing to be compared with, and moments that are
streamed from host memory or files are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import ReplicaMismatchError
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.replica_copies import (
    Copies,
    copies_of_gradients,
    copies_of_model,
    copies_of_state,
    digest_of,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object

_NAMED = 5
"""Differences that an error shows."""
_GROUPS = ("dp_cp", "expt_dp", "inter_dist_opt", "tp", "expt_tp", "embd")


@dataclass(frozen=True)
class _Finding:
    """What one rank holds of a tensor of which some rank of the group holds something else."""

    group: str
    ranks: tuple[int, ...]
    name: str
    digest: int
    has_owner: bool = False
    """Whether the owner of a shard computes the tensor and sends it to the other ranks."""


class ReplicaCheck:
    """Compares the copies of one run.

    Args:
        chunks, optimizer, groups: of this rank.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        groups: ProcessGroupCollection,
    ) -> None:
        self.chunks, self.optimizer, self.groups = chunks, optimizer, groups
        self._names: dict[str, list[str]] = {}
        self._sums: dict[str, Tensor] = {}
        self._num_steps = 0

    @torch.no_grad()
    def before_update(self, norm: float, iteration: int) -> None:
        """Note the digests of gradients and weights, and compare the gradient norm.

        A wrong bit in the reduced gradient of one replica, unless it is one of the lowest, changes
        the norm there, and by the factor of clipping all weights of that replica.

        Args:
            norm: of the whole model's gradient, as this rank knows it; NaN and infinity included.
        Raises:
            ReplicaMismatchError: on all ranks, before any weight has changed.
        Communication:
            one all-reduce of two integers over all processes.
        """
        if not torch_collectives.has_peers(torch_collectives.world()):
            return
        self._add_up()
        if self._is_agreed(norm):
            return
        findings = self._compare(copies_of_gradients(self.optimizer))
        everyone = tuple(range(torch_collectives.world().size()))
        findings.append(_Finding("world", everyone, "gradient norm", _bits(norm)))
        _raise_if_any(findings, iteration)

    @torch.no_grad()
    def compare(self, iteration: int) -> None:
        """Raise on all ranks if any rank holds other bits than its peers.

        Raises:
            ReplicaMismatchError: names tensors, ranks and groups.
        Communication:
            on each group of copies one all-reduce of two integers per tensor, and one integer over
            all processes; where something differs, a gather of the digests of what does.
        """
        if not torch_collectives.has_peers(torch_collectives.world()):
            return
        # What went wrong first comes first in the message.
        findings = self._compare_sums(iteration)
        findings += self._compare(copies_of_gradients(self.optimizer))
        findings += self._compare(copies_of_model(self.chunks, self.groups))
        findings += self._compare(copies_of_state(self.optimizer))
        self._sums, self._num_steps = {}, 0
        _raise_if_any(findings, iteration)

    def _add_up(self) -> None:
        """Add the digests of what this step computes with to those of the steps before it."""
        held: Copies = {}
        for copies in (
            copies_of_gradients(self.optimizer),
            copies_of_model(self.chunks, self.groups),
        ):
            for name, tensors in copies.items():
                held.setdefault(name, []).extend(tensors)
        for group, tensors in held.items():
            if getattr(self.groups, group).size() > 1:
                digests = torch.stack([digest_of(tensor) for _, tensor in tensors])
                # An odd factor: the same difference in two steps does not cancel.
                self._sums[group] = 3 * self._sums[group] + digests if self._num_steps else digests
                self._names[group] = [name for name, _ in tensors]
        self._num_steps += 1

    def _compare_sums(self, iteration: int) -> list[_Finding]:
        if not self._num_steps:
            return []
        first = iteration - self._num_steps + 1
        when = f"in iteration {iteration}"
        if self._num_steps > 1:
            when = f"in iterations {first} to {iteration}"
        findings: list[_Finding] = []
        for group in _GROUPS:
            if group in self._sums:
                names = [f"{name} {when}" for name in self._names[group]]
                findings += self._differences(group, names, self._sums[group])
        return findings

    def _compare(self, copies: Copies) -> list[_Finding]:
        """Return what differs between this rank and those that hold the same tensors."""
        findings: list[_Finding] = []
        for group in _GROUPS:
            held = copies.get(group, [])
            if held and getattr(self.groups, group).size() > 1:
                digests = torch.stack([digest_of(tensor) for _, tensor in held])
                findings += self._differences(group, [name for name, _ in held], digests)
        return findings

    def _differences(self, name: str, names: Sequence[str], digests: Tensor) -> list[_Finding]:
        """Compare digests [tensors] over the ranks of a group."""
        group = getattr(self.groups, name)
        # The largest of ~d is the complement of the smallest d.
        extremes = torch.cat([digests, ~digests])
        torch_collectives.all_reduce(extremes, group, dist.ReduceOp.MAX)
        largest, smallest = extremes.chunk(2)
        ranks = tuple(dist.get_process_group_ranks(group))
        is_sharded = any(item.shard.mesh.shard_size > 1 for item in self.optimizer.shards)
        owned = is_sharded and name in ("dp_cp", "expt_dp")
        return [
            _Finding(name, ranks, names[i], int(digests[i]), owned and names[i][:6] == "weight")
            for i in (largest != ~smallest).nonzero().flatten().tolist()
        ]

    @staticmethod
    def _is_agreed(norm: float) -> bool:
        bits = torch.tensor([_bits(norm)], device=current_device())
        extremes = torch.cat([bits, ~bits])
        largest, smallest = torch_collectives.all_reduce(
            extremes, torch_collectives.world(), dist.ReduceOp.MAX
        ).tolist()
        return bool(largest == ~smallest)


def _bits(norm: float) -> int:
    """Return the bits of a number; one NaN is as good as another, whatever bits it has."""
    known = torch.tensor(math.nan if math.isnan(norm) else norm, dtype=torch.float64)
    return int(known.view(torch.int64))


def _raise_if_any(findings: list[_Finding], iteration: int) -> None:
    """Raise on all ranks if any has found something."""
    count = torch.tensor([len(findings)], device=current_device())
    if int(torch_collectives.all_reduce(count, torch_collectives.world())):
        raise _error(all_gather_object(findings, torch_collectives.world()), iteration)


def _error(everyone: Sequence[Sequence[_Finding]], iteration: int) -> ReplicaMismatchError:
    """Describe all differences; equal on all ranks."""
    digests: dict[tuple[str, tuple[int, ...], str, bool], dict[int, int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            key = (finding.group, finding.ranks, finding.name, finding.has_owner)
            digests.setdefault(key, {})[rank] = finding.digest
    # Fewest ranks first: a wrong shard is on one rank, and what was gathered from it on several.
    found = sorted((_difference(*key, held) for key, held in digests.items()), key=lambda it: it[0])
    lines = [text for _, text in found]
    more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return ReplicaMismatchError(
        f"iteration {iteration}: ranks that hold copies of the same tensors hold other bits:\n  "
        + "\n  ".join(lines[:_NAMED])
        + more,
        rule="replicas compute the same updates from the same reduced gradients, so their copies"
        " are equal to the bit; a difference is a fault of memory, processor, device or program",
        flags=["--check-weight-hash-across-dp-replicas-interval"],
        fix="no checkpoint of this state was written: test the machines of these ranks, leave them"
        " out if they are at fault, and resume from the last checkpoint",
    )


def _difference(
    group: str, ranks: tuple[int, ...], name: str, has_owner: bool, held: dict[int, int]
) -> tuple[int, str]:
    """Return how many ranks may be wrong, and which: those that differ from most, or all.

    If a shard has an owner, a majority proves nothing: a bit that flips at the owner while it sends
    the shard is wrong on the ranks that receive it later, which may be most ranks.
    """
    by_digest: dict[int, list[int]] = {}
    for rank, digest in sorted(held.items()):
        by_digest.setdefault(digest, []).append(rank)
    sizes = sorted((len(found) for found in by_digest.values()), reverse=True)
    if sizes[0] > sum(sizes[1:]) and not has_owner:
        most = max(by_digest.values(), key=len)
        odd = [rank for rank in ranks if rank in held and rank not in most]
        return len(odd), f"{name} on global ranks {odd} is not that of {most} ({group})"
    text = f"{name} differs between global ranks {sorted(by_digest.values())} ({group})"
    if has_owner:
        text += (
            "; the fault is on the smaller side, or on the rank that owns the shard and sends it"
        )
    return len(held), text
