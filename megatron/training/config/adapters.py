"""Flags of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag
from megatron.core.transformer.low_rank_adapter import TARGETS


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (LoRA, arXiv 2106.09685)."""

    lora_rank: int | None = None
    """Train adapters of this rank beside the layers of a frozen model, which --load-hf or
    --pretrained-checkpoint gives. Checkpoints hold the adapters alone."""
    lora_alpha: float | None = flag(None, part_of="lora_rank")
    """Their product is scaled by lora-alpha / lora-rank. Default lora-rank."""
    lora_dropout: float = flag(0.0, part_of="lora_rank")
    """Dropout of an adapter's input."""
    lora_target_modules: list[str] = flag(
        list(TARGETS), nargs="+", choices=TARGETS, part_of="lora_rank"
    )
    """Layers that get one."""
    save_adapter: str | None = flag(None, part_of="lora_rank")
    """Write the adapters as a directory of PEFT's when training ends; --save-hf beside it merges
    them into the model."""
