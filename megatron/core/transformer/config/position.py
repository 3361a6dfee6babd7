"""How positions enter the model. Which embedding is used is an argument of the model itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PositionConfig:
    """Rotary settings that layers need (arXiv 2104.09864)."""

    rotary_interleaved: bool = False
    """Rotate neighbouring pairs (2i, 2i+1) instead of the halves (i, i + d/2)."""
    no_rope_freq: list[int] | None = None
    """Per layer: 1 where the layer skips rotary embedding."""
    rotary_base_local: float | None = None
    """Base of the rotary frequencies in layers with a window; None is that of all layers."""
    apply_rope_fusion: bool = False
    """Use a fused rotary kernel where a backend offers one."""
