"""Find ranks whose copies of weights, gradients or optimizer state are not equal to the bit.

Replicas see the same reduced gradients and compute the same updates, so what they hold stays equal
to the bit; a difference is a fault of the hardware, of a driver or of the program. Nothing else
shows it: a wrong bit in one replica changes the gradients of all (H. Dixit et al., "Silent Data
Corruptions at Scale", arXiv 2102.11245).

Tensors are not exchanged but digests of them, one integer each. The check compares

- reduced gradients, weights, their fp32 copies and moments: over data-parallel replicas, or, if
  they are sharded, over the copies of each shard;
- parameters that are not split over tensor-parallel ranks (norms, routers, positions): over these;
- the copies of a tied embedding: over its pipeline stages.

Everything is compared at an interval. A corrupted gradient, or a corrupted weight that has a copy
in fp32, is overwritten by the next update, so a later comparison cannot find it. So before every
update each rank adds up the digests of gradients and weights, without a message, and the sums are
compared at the interval. The norm of the gradient is compared in every step, so that replicas
never decide differently about an update.

Sharded state that exists once has no copy to compare with. Moments that are streamed from host
memory or files are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.model_parameters import names_in_model, tied_parameters
from megatron.core.distributed.parameter_shard import ParameterShard
from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import ReplicaMismatchError
from megatron.core.optimizer.chunked_state_optimizer import ChunkedStateOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object
from megatron.training.hooks.base import Hook
from megatron.training.run.state import StopReason, TakenStep, TrainState

_NAMED = 5
"""Differences that an error shows."""
_ROW = 1024
"""Words that are added before a row is weighted by its place."""

Copies = dict[str, list[tuple[str, Tensor]]]
"""Name of a group of ranks -> (name, tensor) that all of its ranks hold, in one order."""

_GROUPS = ("dp_cp", "expt_dp", "inter_dist_opt", "tp", "expt_tp", "embd")


@dataclass(frozen=True)
class _Difference:
    """A tensor of one rank whose copies in a group are not all equal."""

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
        self._sums: dict[str, tuple[list[str], Tensor]] = {}
        self._num_steps = 0

    @torch.no_grad()
    def before_update(self, norm: float, iteration: int) -> None:
        """Add up the digests of gradients and weights, and compare the gradient norm.

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
        differences = self._compare(copies_of_gradients(self.optimizer))
        everyone = tuple(range(torch_collectives.world().size()))
        differences.append(_Difference("world", everyone, "gradient norm", _bits(norm)))
        _raise_if_any(differences, iteration)

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
        differences = self._compare_sums(iteration)
        differences += self._compare(copies_of_gradients(self.optimizer))
        differences += self._compare(copies_of_model(self.chunks, self.groups))
        differences += self._compare(copies_of_state(self.optimizer))
        self._sums, self._num_steps = {}, 0
        _raise_if_any(differences, iteration)

    def _digests(self, copies: Copies) -> dict[str, tuple[list[str], Tensor]]:
        """Return group -> names and digests [tensors] of the tensors that other ranks hold, too."""
        return {
            group: (
                [name for name, _ in copies[group]],
                torch.stack([digest_of(tensor) for _, tensor in copies[group]]),
            )
            for group in _GROUPS
            if copies.get(group) and getattr(self.groups, group).size() > 1
        }

    def _add_up(self) -> None:
        """Add the digests of this step's gradients and weights to those of the steps before it."""
        held = copies_of_gradients(self.optimizer)
        for group, tensors in copies_of_model(self.chunks, self.groups).items():
            held.setdefault(group, []).extend(tensors)
        for group, (names, digests) in self._digests(held).items():
            # An odd factor: the same difference in two steps does not cancel.
            sums = 3 * self._sums[group][1] + digests if self._num_steps else digests
            self._sums[group] = names, sums
        self._num_steps += 1

    def _compare_sums(self, iteration: int) -> list[_Difference]:
        when = f"in iteration {iteration}"
        if self._num_steps > 1:
            when = f"in iterations {iteration - self._num_steps + 1} to {iteration}"
        return [
            difference
            for group, (names, sums) in self._sums.items()
            for difference in self._differences(group, [f"{name} {when}" for name in names], sums)
        ]

    def _compare(self, copies: Copies) -> list[_Difference]:
        """Return the differences between this rank and the ranks that hold the same tensors."""
        return [
            difference
            for group, (names, digests) in self._digests(copies).items()
            for difference in self._differences(group, names, digests)
        ]

    def _differences(self, name: str, names: Sequence[str], digests: Tensor) -> list[_Difference]:
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
            _Difference(name, ranks, names[i], int(digests[i]), owned and names[i][:6] == "weight")
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


def _raise_if_any(differences: list[_Difference], iteration: int) -> None:
    """Raise on all ranks if any has found something."""
    count = torch.tensor([len(differences)], device=current_device())
    if int(torch_collectives.all_reduce(count, torch_collectives.world())):
        raise _error(all_gather_object(differences, torch_collectives.world()), iteration)


def _error(everyone: Sequence[Sequence[_Difference]], iteration: int) -> ReplicaMismatchError:
    """Describe all differences; equal on all ranks."""
    digests: dict[tuple[str, tuple[int, ...], str, bool], dict[int, int]] = {}
    for rank, differences in enumerate(everyone):
        for difference in differences:
            key = (difference.group, difference.ranks, difference.name, difference.has_owner)
            digests.setdefault(key, {})[rank] = difference.digest
    # Fewest ranks first: a wrong shard is on one rank, and what was gathered from it on several.
    found = sorted((_describe(*key, held) for key, held in digests.items()), key=lambda it: it[0])
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


def _describe(
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


class CompareReplicas(Hook):
    """Stops the run when ranks that hold copies of the same tensors hold other bits.

    Args:
        interval: steps between comparisons.
        save_intervals: steps between checkpoints of any kind, which a comparison precedes.
    """

    def __init__(
        self, check: ReplicaCheck, interval: int, save_intervals: Iterable[int | None]
    ) -> None:
        self.check = check
        self.intervals = [interval, *(every for every in save_intervals if every)]
        self._last_compared = -1
        self._iteration = 0

    def before_training(self, state: TrainState) -> TrainState:
        """Check before every update."""
        self.check.optimizer.norm_checks.append(self._before_update)
        return state

    def before_step(self, state: TrainState) -> None:
        """Remember the iteration."""
        self._iteration = state.iteration + 1

    def _before_update(self, norm: float) -> None:
        self.check.before_update(norm, self._iteration)

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Compare at the intervals."""
        if any(state.iteration % every == 0 for every in self.intervals):
            self._compare(state.iteration)
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Compare the state that will be saved at the end of the run."""
        if state.iteration != self._last_compared:
            self._compare(state.iteration)
        return state

    def _compare(self, iteration: int) -> None:
        self.check.compare(iteration)
        self._last_compared = iteration


def digest_of(tensor: Tensor) -> Tensor:
    """Return one 64-bit integer, [], that a change of any single bit changes.

    A sum modulo 2^64 of the tensor's words, in rows that are multiplied by odd numbers, so that
    rows that change places are seen, too. It is one pass at the speed of memory.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    num_rows, rest = divmod(flat.numel(), 8 * _ROW)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    weights = 2 * torch.arange(num_rows + 1, device=flat.device) + 1
    if num_rows:
        rows = _as_words(flat[: num_rows * 8 * _ROW]).view(num_rows, _ROW)
        total += (rows.sum(1) * weights[:num_rows]).sum()
    if rest:
        last = torch.zeros(8 * _ROW, dtype=torch.uint8, device=flat.device)
        last[:rest] = flat[num_rows * 8 * _ROW :]
        total += last.view(torch.int64).sum() * weights[num_rows]
    return total


def _as_words(flat: Tensor) -> Tensor:
    """Return bytes as 64-bit words; a view where they are aligned."""
    if flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def copies_of_model(
    chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection
) -> Copies:
    """Return the weights (and buffers that are state) of which other ranks hold copies."""
    copies: Copies = {}
    tied: list[tuple[str, Tensor]] = []
    for chunk in chunks:
        chunk.finish_param_sync()
        names = names_in_model(chunk.module)
        are_sharded = set(chunk.sharded_values())
        shared = {id(parameter) for parameter in tied_parameters(chunk.module)}
        for local, parameter in chunk.module.named_parameters():
            if parameter in are_sharded:
                for shard in chunk.shards_of(parameter):
                    _place_shard(copies, shard, "weight", shard.values)
                continue
            meta = get_param_meta(parameter)
            name = f"weight {names[local]}"
            _place(copies, "expt_dp" if meta.is_expert else "dp_cp", name, parameter)
            if meta.split_dim is None:
                _place(copies, "expt_tp" if meta.is_expert else "tp", name, parameter)
            if id(parameter) in shared:
                tied.append(("weight of the tied embedding", parameter))
        for local, buffer in _state_buffers(chunk.module):
            _place(copies, "dp_cp", f"buffer {local}", buffer)
            _place(copies, "tp", f"buffer {local}", buffer)
    # In a V both copies may be on one rank, the first of which is compared with other ranks.
    if tied and groups.embd.size() > 1:
        copies["embd"] = tied[:1]
    return copies


def copies_of_gradients(optimizer: MegatronOptimizer) -> Copies:
    """Return the reduced gradients of the last step of which other ranks hold copies.

    Where one differs, so do the weights that were updated from it: it comes first in the message,
    because it is what went wrong first.
    """
    copies: Copies = {}
    for item in optimizer.shards:
        gradient = item.shard.gradient
        if gradient is not None:
            _place_shard(copies, item.shard, "gradient", gradient)
    return copies


def copies_of_state(optimizer: MegatronOptimizer) -> Copies:
    """Return fp32 weights and moments of which other ranks hold copies."""
    copies: Copies = {}
    if any(
        isinstance(each, ChunkedStateOptimizer) for each in getattr(optimizer, "_optimizers", [])
    ):
        return copies
    state = optimizer.state
    for item in optimizer.shards:
        held: dict[str, Tensor] = {"fp32 weight": item.main_param} if item.is_copy else {}
        held |= {k: v for k, v in state.get(item.main_param, {}).items() if isinstance(v, Tensor)}
        for kind, tensor in held.items():
            _place_shard(copies, item.shard, kind, tensor)
    return copies


def _state_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _place_shard(copies: Copies, shard: ParameterShard, kind: str, values: Tensor) -> None:
    """File what belongs to a shard under the ranks that hold the same range of the parameter."""
    meta = get_param_meta(shard.parameter)
    name = f"{kind} {shard.name}" + ("" if shard.is_full else f"[{shard.begin}:{shard.end}]")
    if shard.mesh.replicate_size > 1:
        is_all = shard.mesh.shard_size == 1
        full = "expt_dp" if meta.is_expert else "dp_cp"
        _place(copies, full if is_all else "inter_dist_opt", name, values)
    if meta.split_dim is None:
        _place(copies, "expt_tp" if meta.is_expert else "tp", name, values)


def _place(copies: Copies, group: str, name: str, tensor: Tensor) -> None:
    copies.setdefault(group, []).append((name, tensor))
