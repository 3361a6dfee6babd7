"""Find ranks whose copies of weights, gradients or optimizer state are not bit-identical.

Replicas use the same reduced gradients and compute the same updates, so their state stays
bit-identical; a difference is a fault of the hardware, of a driver or of the program. No other
check detects it: a wrong bit in one replica changes the gradients of all replicas (H. Dixit et al.,
"Silent Data Corruptions at Scale", arXiv 2102.11245).

Ranks exchange digests, one integer for each tensor. The check compares

- reduced gradients, weights, their fp32 copies and moments: over data-parallel replicas, or, if
  they are sharded, over the copies of each shard;
- parameters that are replicated over tensor-parallel ranks (norms, routers, positions): over tp;
- the copies of a tied embedding: over its pipeline stages.

All of these are compared at an interval. The next update overwrites a corrupted gradient, or a
corrupted weight that has an fp32 copy, so a later comparison cannot find it. So before every update
each rank adds the digests of gradients and weights to a sum, without communication, and the sums
are compared at the interval. The gradient norm is compared in every step, so that all replicas make
the same decision about an update.

Sharded state without a copy cannot be checked. Moments that are streamed from host memory or files
are not checked.
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
"""Number of differences that an error lists."""
_ROW = 1024
"""Number of words in a row; the sum of a row is multiplied by a weight of the row."""

Copies = dict[str, list[tuple[str, Tensor]]]
"""Name of a group -> (name, tensor) for each tensor that all of its ranks hold, in one order."""

_GROUPS = ("dp_cp", "expt_dp", "inter_dist_opt", "tp", "expt_tp", "embd")


@dataclass(frozen=True)
class _Difference:
    """A tensor of one rank whose copies in a group differ."""

    group: str
    ranks: tuple[int, ...]
    name: str
    digest: int
    has_owner: bool = False
    """Whether one rank, the owner of a shard, computes the tensor and sends it to the others."""


class ReplicaCheck:
    """Compare the copies of weights, gradients and state of a run."""

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
        """Add the digests of gradients and weights to the sums, and compare the gradient norm.

        A wrong bit in the reduced gradient of one replica, unless it is one of the lowest bits,
        changes the norm of this replica and, through the clipping factor, all of its weights.

        Args:
            norm: this rank's norm of the whole model's gradient; NaN and infinity are allowed.
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
        """Raise on all ranks if the bits of any rank differ from its peers' bits.

        Raises:
            ReplicaMismatchError: names tensors, ranks and groups.
        Communication:
            on each group of copies one all-reduce of two integers per tensor, and an all-reduce of
            one integer over all processes; if tensors differ, an all-gather of their digests.
        """
        if not torch_collectives.has_peers(torch_collectives.world()):
            return
        # In the order of a step, so that the message begins with the first fault.
        differences = self._compare_sums(iteration)
        differences += self._compare(copies_of_gradients(self.optimizer))
        differences += self._compare(copies_of_model(self.chunks, self.groups))
        differences += self._compare(copies_of_state(self.optimizer))
        self._sums, self._num_steps = {}, 0
        _raise_if_any(differences, iteration)

    def _digests(self, copies: Copies) -> dict[str, tuple[list[str], Tensor]]:
        """Return group -> names and digests [tensors] of the tensors with copies on other ranks."""
        return {
            group: (
                [name for name, _ in copies[group]],
                torch.stack([digest_of(tensor) for _, tensor in copies[group]]),
            )
            for group in _GROUPS
            if copies.get(group) and getattr(self.groups, group).size() > 1
        }

    def _add_up(self) -> None:
        """Add the digests of this step's gradients and weights to the sums of earlier steps."""
        held = copies_of_gradients(self.optimizer)
        for group, tensors in copies_of_model(self.chunks, self.groups).items():
            held.setdefault(group, []).extend(tensors)
        for group, (names, digests) in self._digests(held).items():
            # Because of the odd factor, equal differences in two steps do not cancel.
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
        # The maximum of ~d is the complement of the minimum of d.
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
    """Return the bits of a number; all NaN have the same bits here."""
    known = torch.tensor(math.nan if math.isnan(norm) else norm, dtype=torch.float64)
    return int(known.view(torch.int64))


def _raise_if_any(differences: list[_Difference], iteration: int) -> None:
    """Raise on all ranks if any rank has differences."""
    count = torch.tensor([len(differences)], device=current_device())
    if int(torch_collectives.all_reduce(count, torch_collectives.world())):
        raise _error(all_gather_object(differences, torch_collectives.world()), iteration)


def _error(everyone: Sequence[Sequence[_Difference]], iteration: int) -> ReplicaMismatchError:
    """Return the error that describes the differences of all ranks; equal on all ranks."""
    digests: dict[tuple[str, tuple[int, ...], str, bool], dict[int, int]] = {}
    for rank, differences in enumerate(everyone):
        for difference in differences:
            key = (difference.group, difference.ranks, difference.name, difference.has_owner)
            digests.setdefault(key, {})[rank] = difference.digest
    # Fewest ranks first: a wrong shard is on one rank, the tensor gathered from it on several.
    found = sorted((_describe(*key, held) for key, held in digests.items()), key=lambda it: it[0])
    lines = [text for _, text in found]
    more = f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return ReplicaMismatchError(
        f"iteration {iteration}: copies of the same tensors differ between ranks:\n  "
        + "\n  ".join(lines[:_NAMED])
        + more,
        rule="replicas compute the same updates from the same reduced gradients, so their copies"
        " are bit-identical; a difference is a fault of memory, processor, device or program",
        flags=["--check-weight-hash-across-dp-replicas-interval"],
        fix="no checkpoint of this state was written: test the machines of these ranks, exclude"
        " faulty machines, and resume from the last checkpoint",
    )


def _describe(
    group: str, ranks: tuple[int, ...], name: str, has_owner: bool, held: dict[int, int]
) -> tuple[int, str]:
    """Return the number of ranks that may be wrong, and a description.

    If most ranks agree, the other ranks may be wrong, else all ranks. If a shard has an owner, a
    majority proves nothing: if a bit flips at the owner while it sends the shard, all later
    receivers are wrong, which may be most ranks.
    """
    by_digest: dict[int, list[int]] = {}
    for rank, digest in sorted(held.items()):
        by_digest.setdefault(digest, []).append(rank)
    sizes = sorted((len(found) for found in by_digest.values()), reverse=True)
    if sizes[0] > sum(sizes[1:]) and not has_owner:
        most = max(by_digest.values(), key=len)
        odd = [rank for rank in ranks if rank in held and rank not in most]
        return len(odd), f"{name} on global ranks {odd} differs from {most} ({group})"
    text = f"{name} differs between global ranks {sorted(by_digest.values())} ({group})"
    if has_owner:
        text += "; the fault is in the smaller set, or on the rank that owns the shard and sends it"
    return len(held), text


class CompareReplicas(Hook):
    """Stop the run when copies of the same tensors differ between ranks.

    Args:
        interval: steps between comparisons.
        save_intervals: steps between checkpoints of any kind; a comparison precedes each one.
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
        check = self.check
        check.optimizer.norm_checks.append(lambda norm: check.before_update(norm, self._iteration))
        return state

    def before_step(self, state: TrainState) -> None:
        """Store the iteration."""
        self._iteration = state.iteration + 1

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
    """Return a digest of a tensor, int64 [], that changes if any single bit changes.

    It is the sum, modulo 2^64, of the tensor's 64-bit words. The words of a row are multiplied by
    the odd weight of the row, so that swapped rows change the digest. The memory is read once.
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
    """Return bytes as 64-bit words; a view if they are aligned."""
    if flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def copies_of_model(
    chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection
) -> Copies:
    """Return the weights and persistent buffers that other ranks also hold."""
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
    # In a V-shaped pipeline, one rank may hold both copies; compare the first with other ranks.
    if tied and groups.embd.size() > 1:
        copies["embd"] = tied[:1]
    return copies


def copies_of_gradients(optimizer: MegatronOptimizer) -> Copies:
    """Return the reduced gradients of the last step that other ranks also hold."""
    copies: Copies = {}
    for item in optimizer.shards:
        gradient = item.shard.gradient
        if gradient is not None:
            _place_shard(copies, item.shard, "gradient", gradient)
    return copies


def copies_of_state(optimizer: MegatronOptimizer) -> Copies:
    """Return the fp32 weights and moments that other ranks also hold."""
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
    """Add a tensor of a shard to the groups whose ranks hold the same range of the parameter."""
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
