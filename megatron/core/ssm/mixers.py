"""The recurrent mixers by their names in settings."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.ssm.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.recurrent_mixer import RecurrentMixer
from megatron.core.ssm.short_convolution import GatedShortConvolution
from megatron.core.transformer.config.layer_kinds import (
    GATED_DELTA_NET,
    KIMI,
    MAMBA,
    SHORT_CONV,
)

RECURRENT_MIXERS: Mapping[str, type[RecurrentMixer]] = {
    GATED_DELTA_NET: GatedDeltaNet,
    KIMI: KimiDeltaAttention,
    MAMBA: MambaMixer,
    SHORT_CONV: GatedShortConvolution,
}
"""Name of a `LayerKind`'s mixer -> its class."""
