"""Find parameters in an opened checkpoint, and read them unsharded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import loader
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.loader import Contents, SliceReader
from megatron.core.dist_checkpointing.manifest import StoredTensor
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.shard_plan import ShardIndex
from megatron.core.foundation.errors import CheckpointError
from megatron.core.settings.flags import from_args
from megatron.core.transformer.low_rank_adapter import LoraConfig

_LAYER = re.compile(r"((?:vision_model\.)?(?:decoder|encoder)\.layers)\.(\d+)\.(.+)", re.ASCII)


@dataclass(frozen=True)
class Source:
    """The place of a parameter in a checkpoint: a tensor, or one layer of a stacked tensor."""

    tensor: StoredTensor
    layer: int | None
    shape: tuple[int, ...]


def find_source(contents: Contents, megatron_name: str) -> Source:
    tensors = contents.manifest.tensors
    if megatron_name in tensors:
        return Source(tensors[megatron_name], None, tensors[megatron_name].shape)
    match = _LAYER.fullmatch(megatron_name)
    stack = None if match is None else tensors.get(f"{match[1]}.{match[3]}")
    if match is None or stack is None or int(match[2]) >= stack.shape[0]:
        raise CheckpointError(
            f"{contents.directory} has no {megatron_name}.",
            rule="an export needs all weights of the model",
            fix="export a complete checkpoint",
        )
    return Source(stack, int(match[2]), stack.shape[1:])


def read_source(source: Source, reader: SliceReader, device: torch.device | None = None) -> Tensor:
    """Return a parameter [...], unsharded."""
    into = torch.empty(source.shape, dtype=DTYPES[source.tensor.dtype], device=device)
    read_box(source, reader, (tuple(0 for _ in source.shape), source.shape), into)
    return into


def read_box(source: Source, reader: SliceReader, box: Box, into: Tensor) -> None:
    """Read a box of a parameter into a tensor [...] of the box's shape and any float dtype."""
    offset, shape = box
    if source.layer is not None:
        offset, shape, into = (source.layer, *offset), (1, *shape), into.unsqueeze(0)
    loader.read_box(ShardIndex(source.tensor), (offset, shape), reader, into)


@dataclass(frozen=True)
class Factors:
    """The adapter of one layer; for routed experts, each tensor has a leading axis e."""

    down: Tensor
    """A, [r, i]."""
    up: Tensor
    """B, [o, r]."""
    magnitude: Tensor | None
    """[o]; None without DoRA."""


@dataclass(frozen=True)
class StoredAdapters:
    """The low-rank adapters of a checkpoint; see `megatron.core.transformer.low_rank_adapter`."""

    contents: Contents
    rank: int
    alpha: float
    dropout: float
    use_dora: bool

    def of(self, megatron_name: str) -> Factors | None:
        """Return the adapter of a weight, or None."""
        parts = ("down", "up", "magnitude") if self.use_dora else ("down", "up")
        names = [f"{megatron_name.removesuffix('.weight')}.adapter.{part}" for part in parts]
        stored = self.contents.manifest.tensors
        stack = _LAYER.sub(r"\1.\3", names[0])
        if not megatron_name.endswith(".weight") or not (names[0] in stored or stack in stored):
            return None
        with self.contents.open_reader() as reader:
            found = [read_source(find_source(self.contents, name), reader) for name in names]
        down, up, *magnitude = found
        return Factors(down, up, magnitude[0] if magnitude else None)

    def merged(self, megatron_name: str, weight: Tensor) -> Tensor:
        """Return a weight [o, i], or [e, o, i], merged with its adapter in fp32.

        Weights of experts are merged in place, one after the other.
        """
        found = self.of(megatron_name)
        if found is None:
            return weight
        if weight.dim() == 2:
            return self._merged(weight, found.down, found.up, found.magnitude)
        for rows, down, up in zip(weight, found.down, found.up, strict=True):
            rows.copy_(self._merged(rows, down, up, None))
        return weight

    def _merged(self, weight: Tensor, down: Tensor, up: Tensor, magnitude: Tensor | None) -> Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        scale = self.alpha / self.rank
        rows = torch.addmm(weight.to(dtype), up.to(dtype), down.to(dtype), alpha=scale)
        if magnitude is not None:
            rows *= (magnitude.to(dtype) / torch.linalg.vector_norm(rows, dim=1))[:, None]
        return rows.to(weight.dtype)


def stored_values(contents: Contents) -> Mapping[str, Any]:
    """Return the settings of the run that saved a checkpoint, by Megatron's names."""
    args = contents.common_state().get("args")
    return {} if args is None else vars(args)


def stored_adapters(contents: Contents) -> StoredAdapters:
    """Return the adapters of a checkpoint.

    Raises:
        CheckpointError: the checkpoint has no adapters.
    """
    settings = from_args(LoraConfig, stored_values(contents))
    rank = settings.lora_rank
    if not rank:
        raise CheckpointError(
            f"{contents.directory} holds no adapters.",
            rule="a run with --lora-rank saves them",
            flags=["--lora-rank"],
            fix="use a checkpoint of such a run",
        )
    alpha = settings.lora_alpha or rank
    dropout, use_dora = settings.lora_dropout or 0.0, bool(settings.use_dora)
    return StoredAdapters(contents, int(rank), float(alpha), dropout, use_dora)
