"""The mixers with a state, by the names that settings give them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.kimi_delta_attention import KimiDeltaAttention
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.ssm.recurrent_mixer import RecurrentMixer
from megatron.core.transformer.config.layer_kinds import GATED_DELTA_NET, KIMI, MAMBA

RECURRENT_MIXERS: Mapping[str, type[RecurrentMixer]] = {
    GATED_DELTA_NET: GatedDeltaNet,
    KIMI: KimiDeltaAttention,
    MAMBA: MambaMixer,
}
"""Name of a `LayerKind`'s mixer -> its class."""
