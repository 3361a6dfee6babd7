"""The L2 norm and the digest of all weights; each weight counts once in any layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.foundation.device import current_device
from megatron.core.optimizer.gradient_norm import is_counted_on_rank, without_padding
from megatron.core.parameters.initialization import canonical_names
from megatron.core.parameters.param_meta import (
    full_shape,
    get_param_meta,
    num_elements_before_padding,
    shard_of,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import sum_across_ranks
from megatron.core.utils import unwrap_model

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit factors with mixed bits: of the place, of the bits, and of their sum."""
_AT_ONCE = 1 << 22
"""Elements that are mixed at a time: each takes 8 bytes in four temporaries."""


def params_norm(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> float:
    """Return the norm over all ranks of one replica, without padding rows of the vocabulary.

    Communication:
        waits for an overlapped gather of updated parameters. Then one all-reduce over the
        model-parallel ranks for dense parameters and one for experts; sharded parameters need an
        additional all-reduce over their shards.
    """
    total = 0.0
    for is_expert, across in ((False, groups.mp), (True, groups.tp_ep_pp)):
        squares = 0.0
        for chunk in model:
            sums = {False: 0.0, True: 0.0}
            for _, _, values, is_sharded in _pieces(chunk, groups, is_expert=is_expert):
                sums[is_sharded] += _sum_of_squares(values)
            if isinstance(chunk, DistributedDataParallel) and chunk.sharded_values():
                sums[True] = sum_across_ranks([sums[True]], chunk.mesh(is_expert).shard)[0]
            squares += sums[False] + sums[True]
        total += sum_across_ranks([squares], across)[0]
    return math.sqrt(total)


def weights_digest(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> int:
    """Return a 64-bit digest of all weights of one replica, which no layout changes.

    Each element is mixed with its place in the whole tensor, and the results are added modulo
    2^64; a sum over the elements of a tensor is multiplied by a hash of its name.

    Communication: as in `params_norm`.
    """
    total = 0
    for is_expert, across in ((False, groups.mp), (True, groups.tp_ep_pp)):
        axis = groups.expt_tp if is_expert else groups.tp
        local = torch.zeros((), dtype=torch.int64, device=current_device())
        for chunk in model:
            inner = unwrap_model(chunk)
            by_name = canonical_names(inner)
            names = {id(p): by_name[name] for name, p in inner.named_parameters()}
            sums = {False: torch.zeros_like(local), True: torch.zeros_like(local)}
            for parameter, begin, values, is_sharded in _pieces(chunk, groups, is_expert=is_expert):
                of_name = hashlib.sha256(names[id(parameter)].encode()).digest()
                places = _Places(parameter, axis.rank(), axis.size())
                mixed = places.mixed(values.reshape(-1), begin)
                sums[is_sharded] += mixed * (int.from_bytes(of_name[:7], "little") | 1)
            if isinstance(chunk, DistributedDataParallel) and chunk.sharded_values():
                torch_collectives.all_reduce(sums[True], chunk.mesh(is_expert).shard)
            local += sums[False] + sums[True]
        torch_collectives.all_reduce(local, across)
        total += int(local)
    return total % 2**64


def _pieces(
    chunk: nn.Module, groups: ProcessGroupCollection, *, is_expert: bool
) -> Iterator[tuple[nn.Parameter, int, Tensor, bool]]:
    """Yield (parameter, first element, values, whether they are a shard) of what this rank counts.

    Values do not include padding rows of the vocabulary.
    """
    wrapper = chunk if isinstance(chunk, DistributedDataParallel) else None
    if wrapper is not None:
        wrapper.finish_param_sync()  # an overlapped gather would end in the next forward pass
    are_sharded = set() if wrapper is None else set(wrapper.sharded_values())
    for parameter in chunk.parameters():
        meta = get_param_meta(parameter)
        if meta.is_expert != is_expert or not is_counted_on_rank(parameter, groups):
            continue
        if wrapper is not None and parameter in are_sharded:
            for shard in wrapper.shards_of(parameter):
                values = without_padding(shard, shard.values.detach(), groups)
                yield parameter, shard.begin, values, True
        else:
            axis_rank = (groups.expt_tp if is_expert else groups.tp).rank()
            end = num_elements_before_padding(parameter, meta, axis_rank)
            yield parameter, 0, parameter.detach().reshape(-1)[:end], False


def _sum_of_squares(values: Tensor) -> float:
    """Return the sum, computed in fp64 because there may be billions of small squares."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


class _Places:
    """The place of each element of a local tensor in the whole tensor."""

    def __init__(self, parameter: nn.Parameter, axis_rank: int, axis_size: int) -> None:
        meta, self._shape = get_param_meta(parameter), parameter.shape
        whole = full_shape(parameter.shape, meta, axis_size)
        self._indices = [torch.arange(size) for size in whole]
        if meta.split_dim is not None:
            shape = [1] * len(whole)
            shape[meta.split_dim] = -1
            rows = self._indices[meta.split_dim].view(shape)
            self._indices[meta.split_dim] = shard_of(rows, meta, axis_rank, axis_size).reshape(-1)
        self._steps = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]

    def mixed(self, values: Tensor, begin: int) -> Tensor:
        """Return the sum of mixed elements [n] from local element `begin` on: int64 []."""
        bits = values.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32,
                                         8: torch.int64}[values.element_size()])  # fmt: skip
        total = torch.zeros((), dtype=torch.int64, device=values.device)
        for first in range(0, len(bits), _AT_ONCE):
            part = bits[first : first + _AT_ONCE].long()
            rest = torch.arange(len(part), device=values.device) + (begin + first)
            place = torch.zeros_like(rest)
            for size, index, step in zip(
                reversed(self._shape), reversed(self._indices), reversed(self._steps), strict=True
            ):
                place += index.to(values.device)[rest % size] * step
                rest = rest // size
            x = part * _MIX[1] + place * _MIX[0]
            x = (x ^ (x >> 29)) * _MIX[2]
            total += (x ^ (x >> 32)).sum()
        return total
