"""How positions enter the model. Which embedding is used is an argument of the model itself."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flag_expressions import layer_pattern
from megatron.core.settings.flags import flag


@dataclass
class PositionConfig:
    """Rotary settings that layers need (arXiv 2104.09864)."""

    rotary_interleaved: bool = False
    """Rotate neighbouring pairs (2i, 2i+1) instead of the halves (i, i + d/2). Latent attention
    does so without it."""
    no_rope_freq: list[int] | None = flag(None, parse=layer_pattern, type_text="int or list expr")
    """Layers without rotary embedding: N for every N-th, or a 0/1 list such as ([0]*3+[1])*8."""
    rotary_base_local: float | None = flag(None, kind=int)
    """Base of the rotary frequencies in layers with a window; None is that of all layers."""
    mrope_section: list[int] | None = flag(None, nargs="+")
    """Pairs of channels of a head whose angles are of a token's position in time, in height and in
    width (--position-embedding-type mrope, arXiv 2409.12191)."""
    mrope_interleaved: bool = False
    """Give the pairs of channels to time, height and width in turn, not one section after the
    other (arXiv 2511.21631)."""
    apply_rope_fusion: bool = flag(
        False,
        "--no-rope-fusion",
        cli_default=True,
        help="Rotary embedding from plain operations.",
    )
    """Use a fused rotary kernel where a backend offers one."""

    def rotates_in(self, layer_number: int) -> bool:
        """Return whether a layer, by its 1-based number in the whole model, has rotary positions
        where the model has them."""
        skips = self.no_rope_freq
        # Layers after the last one (those of later tokens) are like it.
        return not (skips and skips[min(layer_number, len(skips)) - 1])
