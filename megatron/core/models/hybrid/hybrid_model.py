"""Hybrid models, whose layers are given by a pattern of letters, with Megatron's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import has_engine
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class HybridModel(GPTModel):
    """A `GPTModel` whose layers are given by `hybrid_layer_pattern`.

    Its checkpoints have the layers of the pattern; a run of either class loads the checkpoints of
    the other (`megatron.training.checkpointing.other_layers`).

    Args:
        config: config of the model; if it has no pattern, the model uses a copy with the argument.
        hybrid_stack_spec: `megatron.core.models.hybrid.hybrid_layer_specs.hybrid_stack_spec`, or
            specs of layers.
        hybrid_layer_pattern: letters, see `transformer.config.layer_kinds`.
        hybrid_override_pattern: former name of `hybrid_layer_pattern`.
        options: see `GPTModel`. By default the pattern gives the layers of multi-token
            prediction.
    Raises:
        ConfigError: the patterns of config and arguments differ.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hybrid_stack_spec: Callable[..., Any] | ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        hybrid_layer_pattern: str | None = None,
        *,
        hybrid_override_pattern: str | None = None,
        position_embedding_type: str = "none",
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **options: Any,
    ) -> None:
        patterns = (config.hybrid_layer_pattern, hybrid_layer_pattern, hybrid_override_pattern)
        given = {pattern for pattern in patterns if pattern is not None}
        if len(given) > 1:
            raise ConfigError(
                f"HybridModel got the patterns {', '.join(map(repr, sorted(given)))}.",
                rule="a model has one pattern, in the config or as an argument",
                flags=["--hybrid-layer-pattern"],
                fix="drop the argument, or give the config the same pattern",
            )
        if config.hybrid_layer_pattern is None and given:
            config = replace(config, hybrid_layer_pattern=given.pop())
        spec: Any = hybrid_stack_spec
        if callable(spec) and not isinstance(spec, ModuleSpec):
            rank = resolve_groups(pg_collection).pp.rank()
            spec = spec(config, vp_stage=vp_stage, pp_rank=rank)
        if "mtp_block_spec" not in options:
            options["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, has_engine(config))
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


class MambaModel(HybridModel):
    """`HybridModel` under its former name; its spec is also called `mamba_stack_spec`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if "mamba_stack_spec" in options:
            options["hybrid_stack_spec"] = options.pop("mamba_stack_spec")
        super().__init__(*args, **options)


__all__ = ["HybridModel", "MambaModel"]
