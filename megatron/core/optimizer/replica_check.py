"""Find ranks whose copies of weights or optimizer state are not equal to the bit.

Replicas see the same reduced gradients and compute the same updates, so what they hold stays equal
to the bit; a difference is a fault of the hardware, of a driver or of the program. Nothing else
tells of it: a wrong bit in one replica changes the gradients of all (H. Dixit et al., "Silent Data
Corruptions at Scale", arXiv 2102.11245).

Tensors are not exchanged but digests of them, one integer each. Compared are

- weights and their fp32 copies and moments over the ranks that hold them whole: data-parallel
  replicas, or where they are sharded the copies of each shard;
- what is not split over tensor-parallel ranks over those (norms, routers, positions);
- the copies of a tied embedding over its pipeline stages.

A part of sharded state that exists once has nothing to be compared with, and moments that are
streamed from host memory or files are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from megatron.core.transport import backend
from megatron.core.transport.object_collectives import all_gather_object

_ROW = 1024
"""Words that are added before a row is weighted by its place."""
_NAMED = 5
"""Differences that an error shows."""

Copies = dict[str, list[tuple[str, Tensor]]]
"""Name of a group of ranks -> (name, tensor) that all of its ranks hold, in one order."""


@dataclass(frozen=True)
class _Finding:
    """What one rank holds of a tensor of which some rank of the group holds something else."""

    group: str
    ranks: tuple[int, ...]
    name: str
    digest: int


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


@torch.no_grad()
def check_replicas(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    groups: ProcessGroupCollection,
    iteration: int,
) -> None:
    """Raise on all ranks if any rank holds other bits than its peers.

    Raises:
        ReplicaMismatchError: names tensors, ranks and groups.
    Communication:
        on each group of copies one all-reduce of two integers per tensor, and one integer over all
        processes; where something differs, a gather of the digests of what does.
    """
    findings: list[_Finding] = []
    for copies in (copies_of_model(chunks, groups), copies_of_state(optimizer)):
        for group_name in ("dp_cp", "expt_dp", "inter_dist_opt", "tp", "expt_tp", "embd"):
            group = getattr(groups, group_name)
            held = copies.get(group_name, [])
            if held and group.size() > 1:
                digests = torch.stack([digest_of(tensor) for _, tensor in held])
                # The largest of ~d is the complement of the smallest d.
                extremes = torch.cat([digests, ~digests])
                backend.all_reduce(extremes, group, dist.ReduceOp.MAX)
                largest, smallest = extremes.chunk(2)
                ranks = tuple(dist.get_process_group_ranks(group))
                findings += [
                    _Finding(group_name, ranks, held[i][0], int(digests[i]))
                    for i in (largest != ~smallest).nonzero().flatten().tolist()
                ]
    if not backend.has_peers(backend.world()):
        return
    count = torch.tensor([len(findings)], device=current_device())
    if int(backend.all_reduce(count, backend.world())):
        raise _error(all_gather_object(findings, backend.world()), iteration)


def _error(everyone: Sequence[Sequence[_Finding]], iteration: int) -> ReplicaMismatchError:
    """Describe all differences; equal on all ranks."""
    digests: dict[tuple[str, tuple[int, ...], str], dict[int, int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            key = (finding.group, finding.ranks, finding.name)
            digests.setdefault(key, {})[rank] = finding.digest
    lines = [_difference(*key, held) for key, held in digests.items()]
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


def _difference(group: str, ranks: tuple[int, ...], name: str, held: dict[int, int]) -> str:
    """Say which ranks differ from most, or that there is no majority."""
    by_digest: dict[int, list[int]] = {}
    for rank, digest in sorted(held.items()):
        by_digest.setdefault(digest, []).append(rank)
    sizes = sorted((len(found) for found in by_digest.values()), reverse=True)
    if sizes[0] > sum(sizes[1:]):
        most = max(by_digest.values(), key=len)
        odd = [rank for rank in ranks if rank in held and rank not in most]
        return f"{name} on global ranks {odd} is not that of {most} ({group})"
    return f"{name} differs between global ranks {sorted(by_digest.values())} ({group})"
