"""Hybrid models, whose layers are given by a pattern of letters, with Megatron's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class MambaModel(GPTModel):
    """A `GPTModel` whose layers are given by `hybrid_layer_pattern`.

    Args:
        config: config of the model; if it has no pattern, the model uses a copy with the argument.
        mamba_stack_spec: `megatron.core.models.mamba.mamba_layer_specs.mamba_stack_spec`, or specs
            of layers.
        hybrid_layer_pattern: letters, see `transformer.config.layer_kinds`.
        hybrid_override_pattern: former name of `hybrid_layer_pattern`.
        options: see `GPTModel`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mamba_stack_spec: Callable[..., Any] | ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        *,
        hybrid_layer_pattern: str | None = None,
        hybrid_override_pattern: str | None = None,
        position_embedding_type: str = "none",
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **options: Any,
    ) -> None:
        pattern = hybrid_layer_pattern or hybrid_override_pattern
        if pattern is not None and config.hybrid_layer_pattern is None:
            config = replace(config, hybrid_layer_pattern=pattern)
        spec: Any = mamba_stack_spec
        if callable(spec) and not isinstance(spec, ModuleSpec):
            rank = resolve_groups(pg_collection).pp.rank()
            spec = spec(config, vp_stage=vp_stage, pp_rank=rank)
        super().__init__(
            config,
            spec,
            vocab_size,
            max_sequence_length,
            position_embedding_type=position_embedding_type,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **options,
        )


__all__ = ["MambaModel"]
