"""Layer specs of hybrid models."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def mamba_stack_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layer specs of one pipeline stage, from the config's pattern."""
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=pp_rank
    )
