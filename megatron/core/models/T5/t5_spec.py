"""Specs of T5 layers: GPT layers; decoder layers also have cross attention."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import engine_or_local, gpt_layer_submodules
from megatron.core.transformer.backend import Backend, LocalBackend
from megatron.core.transformer.cross_attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer


def encoder_layer(backend: Backend) -> ModuleSpec:
    """Return the spec of a layer with bidirectional attention."""
    parts = gpt_layer_submodules(backend, attn_mask_type=AttnMaskType.padding)
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def decoder_layer(backend: Backend) -> ModuleSpec:
    """Return the spec of a causal layer with cross attention to the encoder's output."""
    parts = gpt_layer_submodules(backend)
    parts.pre_cross_attn_layernorm = backend.norm
    parts.cross_attention = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=backend.column_linear,
            linear_kv=backend.column_linear,
            core_attention=backend.core_attention,
            linear_proj=backend.row_linear,
        ),
    )
    parts.cross_attn_bda = get_bias_dropout_add
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def backend_named(transformer_impl: str) -> Backend:
    """Return the backend for a value of `--transformer-impl`."""
    return LocalBackend() if transformer_impl == "local" else engine_or_local()


def _block(layer: ModuleSpec, num_layers: int) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules([layer] * num_layers, WrappedTorchNorm)


def get_t5_encoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return the specs of all encoder layers, of all stages, in plain torch."""
    return _block(encoder_layer(LocalBackend()), num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return the specs of all decoder layers, of all stages, in plain torch."""
    return _block(decoder_layer(LocalBackend()), num_layers)


def get_t5_encoder_with_transformer_engine_block_spec(
    num_layers: int,
) -> TransformerBlockSubmodules:
    """Return the specs of all encoder layers with Transformer Engine's parameter names."""
    return _block(encoder_layer(engine_or_local()), num_layers)


def get_t5_decoder_with_transformer_engine_block_spec(
    num_layers: int,
) -> TransformerBlockSubmodules:
    """Return the specs of all decoder layers with Transformer Engine's parameter names."""
    return _block(decoder_layer(engine_or_local()), num_layers)
