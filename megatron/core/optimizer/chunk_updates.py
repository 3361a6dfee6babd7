"""Kernels that update a chunk of state in its stored form, without decoding it to memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.optimizer.state_codec import BFloat16Codec, Codec, Float32Codec

ADAM, ADAMW = "Adam", "AdamW"
OTHER_UPDATE = "another update than Adam's"
"""Kinds of updates."""


@dataclass(frozen=True)
class StoredSegment:
    """The part of a shard that is in a chunk; it begins at the start of a block.

    Attributes:
        gradient: the segment's gradient, [e]; weight: a view of its model weights.
        settings: the settings of its parameter group.
        first_block: its first block in the chunk.
        first_place: number of that block, the key of its random bits.
    """

    gradient: Tensor
    weight: Tensor
    settings: Mapping[str, Any]
    first_block: int
    first_place: int


def storage_kind(codec: Codec, *, is_remainder: bool) -> int:
    """Return the number that identifies the form of a column in Adam's kernel."""
    if is_remainder:
        return 4
    if isinstance(codec, Float32Codec):
        return 0
    if isinstance(codec, BFloat16Codec):
        return 1
    return 2 if getattr(codec, "dtype", None) == torch.float16 else 3


_NUMBERS = ("lr", "eps", "weight_decay")
update_blocks: Callable[..., None] = triton_kernels.deferred("adam", "update_blocks")


def update_segments(
    segments: Iterable[StoredSegment],
    columns: Mapping[str, Tensor],
    kinds: Mapping[str, int],
    main_name: str,
    step: int,
    factor: float,
    *,
    decouples_decay: bool,
) -> None:
    """Update segments of a chunk by Adam in place, one launch for each.

    Args:
        columns: uint8 [blocks, bytes] of the chunk by name of the state; kinds: `storage_kind`.
        main_name: name of the main weight, if there is a column for it.
        step: updates before this one. factor: factor on gradients.
    """
    names = ("exp_avg", "exp_avg_sq", main_name)
    for segment in segments:
        settings = segment.settings
        beta1, beta2 = settings["betas"]
        parts = [
            columns[name][segment.first_block :] if name in columns else None for name in names
        ]
        update_blocks(
            segment.gradient, segment.weight, tuple(parts),
            tuple(kinds.get(name, 0) for name in names), segment.first_place, step, factor,
            {"beta1": beta1, "beta2": beta2, **{name: settings[name] for name in _NUMBERS}},
            decouples_decay,
        )  # fmt: skip
