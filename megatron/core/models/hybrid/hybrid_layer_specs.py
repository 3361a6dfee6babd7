"""Layer specs of hybrid models."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def hybrid_stack_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layer specs of one pipeline stage, from the config's pattern."""
    return get_gpt_decoder_block_spec(
        config, has_engine(config), vp_stage=vp_stage, pp_rank=pp_rank
    )


def has_engine(config: TransformerConfig) -> bool:
    """Return whether the layers have Transformer Engine's names; latent attention is local."""
    return config.transformer_impl == "transformer_engine" and not config.multi_latent_attention
