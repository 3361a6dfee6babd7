"""Flags of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag
from megatron.core.transformer.low_rank_adapter import LoraConfig


@dataclass(frozen=True, kw_only=True)
class LoraSettings(LoraConfig):
    """Low-rank adapters (LoRA, arXiv 2106.09685)."""

    save_adapter: str | None = flag(None, part_of="lora_rank")
    """Write the adapters as a directory of PEFT's when training ends; --save-hf beside it merges
    them into the model."""
