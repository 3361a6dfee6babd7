"""Specs of BERT layers: GPT layers with bidirectional attention."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import engine_or_local, gpt_layer_submodules
from megatron.core.transformer.backend import Backend, LocalBackend
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer


def _layer(backend: Backend) -> ModuleSpec:
    parts = gpt_layer_submodules(backend, attn_mask_type=AttnMaskType.padding)
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def get_bert_layer_local_spec() -> ModuleSpec:
    """Return the spec of a layer in plain torch."""
    return _layer(LocalBackend())


def get_bert_layer_with_transformer_engine_spec() -> ModuleSpec:
    """Return the spec of a layer with Transformer Engine's parameter names."""
    return _layer(engine_or_local())


bert_layer_local_spec = get_bert_layer_local_spec()
"""The spec of a layer in plain torch."""


def __getattr__(name: str) -> ModuleSpec:
    # Made on access, so that importing this module does not import Transformer Engine.
    if name == "bert_layer_with_transformer_engine_spec":
        return get_bert_layer_with_transformer_engine_spec()
    raise AttributeError(name)
