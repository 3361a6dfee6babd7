"""What several ranks hold as copies, and digests that tell whether the copies are equal.

See `replica_check` for what is compared and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.model_parameters import names_in_model, tied_parameters
from megatron.core.distributed.parameter_shard import ParameterShard
from megatron.core.optimizer.chunked_state_optimizer import ChunkedStateOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection

_ROW = 1024
"""Words that are added before a row is weighted by its place."""

Copies = dict[str, list[tuple[str, Tensor]]]
"""Name of a group of ranks -> (name, tensor) that all of its ranks hold, in one order."""


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
