"""Broadcast the batch that one rank of a tensor-parallel group has read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import DataError
from megatron.core.process_groups_config import resolve_group
from megatron.core.topology.group import Group
from megatron.core.transport import collectives

MAX_DIMS = 5
_OK, _MISSING, _WRONG_DTYPE, _TOO_MANY_DIMS = range(4)
_PROBLEMS = {
    _MISSING: ("is missing from the batch", "the batch holds every key that is broadcast"),
    _WRONG_DTYPE: ("has another dtype", "all keys of one broadcast have the requested dtype"),
    _TOO_MANY_DIMS: ("has too many dimensions", f"a tensor has at most {MAX_DIMS} dimensions"),
}


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    tp_group: Group | None = None,
) -> dict[str, Tensor]:
    """Send the tensors `keys` [...] of the group's first rank to all its ranks.

    Args:
        keys: names, the same on all ranks and in the same order.
        data: the batch; used on the first rank only, None elsewhere.
        datatype: dtype of every tensor.
        tp_group: None is the tensor-parallel group of the current collection.
    Returns:
        the tensors on `current_device()`; they share one allocation.
    Communication:
        two broadcasts: the shapes, then all values as one flat tensor.
    Raises:
        DataError: on every rank, if the first rank's batch lacks a key or has another dtype.
    """
    group = resolve_group(tp_group, "tp")
    is_alone, is_source = group.size() == 1, group.rank() == 0
    device = current_device()
    header = torch.zeros((len(keys), MAX_DIMS + 2), dtype=torch.int64)
    if is_source:
        for row, key in zip(header, keys, strict=True):
            _describe(row, (data or {}).get(key), datatype)
    if not is_alone:
        header = collectives.broadcast(header.to(device), group)
    described = header.tolist()
    for key, (status, *_) in zip(keys, described, strict=True):
        if status != _OK:
            raise _problem(key, status, (data or {}).get(key), datatype)

    shapes = [row[2 : 2 + row[1]] for row in described]
    if is_source:
        assert data is not None
        flat = torch.cat([data[key].reshape(-1) for key in keys]).to(device)
    else:
        total = sum(math.prod(shape) for shape in shapes)
        flat = torch.empty(total, dtype=datatype, device=device)
    if not is_alone:
        collectives.broadcast(flat, group)
    pieces = flat.split([math.prod(shape) for shape in shapes])
    return {k: p.view(shape) for k, p, shape in zip(keys, pieces, shapes, strict=True)}


def _describe(row: Tensor, value: Tensor | None, datatype: torch.dtype) -> None:
    """Write status, number of dimensions and sizes of one tensor."""
    if value is None:
        row[0] = _MISSING
    elif value.dtype != datatype:
        row[0] = _WRONG_DTYPE
    elif value.dim() > MAX_DIMS:
        row[0] = _TOO_MANY_DIMS
    else:
        row[1] = value.dim()
        row[2 : 2 + value.dim()] = torch.tensor(value.shape)


def _problem(key: str, status: int, value: Tensor | None, datatype: torch.dtype) -> DataError:
    what, rule = _PROBLEMS[status]
    seen = "" if value is None else f" ({value.dtype}, {value.dim()} dimensions)"
    return DataError(
        f"'{key}'{seen} {what}, which should be broadcast as {datatype}.",
        rule=rule,
        flags=[],
        fix=f"give the first tensor-parallel rank a batch with '{key}' of dtype {datatype}",
    )
