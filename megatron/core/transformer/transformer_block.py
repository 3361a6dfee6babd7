"""The stack of layers of one pipeline stage, with activation recomputation.

Recomputation: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", section 5, arXiv 2205.05198.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import RankOffset, ShardedStateDict
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.inference.contexts.static_context import BaseInferenceContext
from megatron.core.offload.saved_activations import offloading, saving_activations
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    resolve_group,
    resolve_groups,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.captured_layer import captured_layers
from megatron.core.transformer.low_precision_layers import use_low_precision
from megatron.core.transformer.module import GraphableMegatronModule, in_compute_dtype
from megatron.core.transformer.residual_streams import (
    equal_streams,
    stream_contraction,
    stream_expansion,
)
from megatron.core.transformer.rotary import cos_sin
from megatron.core.transformer.sharded_state import replace_key_prefixes, sharded_state_dict_of
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor


def get_num_layers_to_build(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the number of layers of a pipeline stage."""
    if pp_rank is None:
        pp_rank = resolve_group(None, "pp").rank()
    return len(pipeline_layout(config).layers(pp_rank, vp_stage))


@dataclass
class TransformerBlockSubmodules:
    """One spec for each layer of this stage, and the norm after the last layer of the model."""

    layer_specs: list[ModuleSpec] | None = None
    layer_norm: ModuleSpec | type | Any = None


def block_submodules(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    vp_stage: int | None,
    pp_rank: int,
) -> TransformerBlockSubmodules:
    """Return the parts of this stage: a layer's spec is repeated for every layer of the stage."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    module = get_module(spec)
    if isinstance(module, type) and issubclass(module, TransformerBlock):
        if not isinstance(spec.submodules, TransformerBlockSubmodules):
            raise ConfigError(
                f"the submodules of a TransformerBlock spec are {type(spec.submodules).__name__}.",
                rule="a block is built from TransformerBlockSubmodules",
                fix="pass ModuleSpec(TransformerBlock, submodules=TransformerBlockSubmodules(...))",
            )
        return spec.submodules
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=WrappedTorchNorm)


class TransformerBlock(GraphableMegatronModule):
    """The layers of one pipeline stage; the last stage, or an earlier one that predicts later
    tokens, ends with the final norm.

    Args:
        spec: spec of one layer (all are equal), or `TransformerBlockSubmodules` with one for each
            layer of this stage.
        post_layer_norm: whether the model has a final norm.
        pre_process: first stage; later stages read their input from `set_input_tensor`.
        post_process: last stage.
        stack: 0-based numbers of the layers of this stack over all stages; default all layers of
            the model. With several stacks in a model pass `TransformerBlockSubmodules`.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        stack: range | None = None,
    ) -> None:
        super().__init__(config)
        self.pg_collection = resolve_groups(pg_collection)
        self.pre_process, self.post_process = pre_process, post_process
        self.vp_stage = vp_stage
        self.input_tensor: Tensor | None = None
        pp_rank = self.pg_collection.pp.rank()
        self.submodules = block_submodules(config, spec, vp_stage, pp_rank)
        layout = pipeline_layout(config)
        self.stack = range(config.num_layers) if stack is None else stack
        offset = max(layout.layers(pp_rank, vp_stage).start, self.stack.start)
        layers: list[Any] = [
            build_module(
                layer_spec,
                config=config,
                layer_number=number,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
                pp_layer_offset=offset,
            )
            for number, layer_spec in enumerate(self.submodules.layer_specs or [], 1)
        ]
        for layer in layers:
            layer.index_in_stack = layer.layer_number - 1 - self.stack.start
            use_low_precision(layer, layer.layer_number, self.pg_collection)
        self.layers = nn.ModuleList(layers)
        self._captured = captured_layers(layers, config)
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.final_layernorm: nn.Module | None = None
        has_final_norm = post_process
        if layout.mtp_on_earlier_stage:
            if config.num_residual_streams > 1:
                raise ConfigError(
                    "several residual streams with multi-token prediction on an earlier stage.",
                    rule="stages exchange all residual streams, and no contracted ones",
                    flags=[
                        "--enable-mhc-connections",
                        "--altup-num-inputs",
                        "--pipeline-model-parallel-layout",
                    ],  # fmt: skip
                    fix="put the letters m next to L",
                )
            has_final_norm = layout.stage(pp_rank, vp_stage) == layout.mtp_stage
        self.expansion = stream_expansion(config, self.pg_collection.tp) if pre_process else None
        self.contraction = (
            stream_contraction(config, self.pg_collection.tp) if has_final_norm else None
        )
        if has_final_norm and post_layer_norm and self.submodules.layer_norm is not None:
            self.final_layernorm = build_module(
                self.submodules.layer_norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the previous stage's output, [s, b, h] ([s/tp, b, h] with sequence parallelism; of
        several residual streams all, [..., n*h])."""
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: object = None,
        padding_mask: Tensor | None = None,
        extract_layer_indices: object = None,
        *,
        other_rotary_pos_emb: Mapping[tuple[tuple[str, float], ...], Tensor] | None = None,
        added_states: Sequence[Tensor] = (),
        vectors_of_layers: Tensor | None = None,
        token_ids: Tensor | None = None,
        inference_params: BaseInferenceContext | None = None,
        dynamic_inference_decode_only: object = None,
    ) -> Tensor:
        """Run the layers of this stage.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] with sequence parallelism); not used after
                the first stage.
            rotary_pos_emb: angles [s, 1, 1, r] of the whole sequence, or None.
            other_rotary_pos_emb: value of `config.rotary_of` -> angles of the layers with it, where
                they differ.
            added_states: tensors of the shape of `hidden_states`; entry i is added after layer i of
                the model. The layers must be on this stage.
            vectors_of_layers: [s, b, L, p], see `PerLayerEmbedding`.
            token_ids: int64 [b, s/cp], for layers that are routed by them.
            others: `rotary_pos_cos_sin`, `sequence_len_offset`, `extract_layer_indices` and
                `dynamic_inference_decode_only` of Megatron's signature are refused if given.
        Returns:
            hidden states of the same shape; on the last stage after the final norm, in the compute
            dtype. Earlier stages return the residual stream, fp32 with `fp32_residual_connection`,
            and of several residual streams all, [s, b, n*h].
        """
        refuse_given(
            "TransformerBlock.forward",
            {
                "rotary_pos_cos_sin": rotary_pos_cos_sin,
                "sequence_len_offset": sequence_len_offset,
                "extract_layer_indices": extract_layer_indices or None,
                "dynamic_inference_decode_only": dynamic_inference_decode_only,
            },
            rule="positions are given as rotary_pos_emb, and the last layer's output is returned",
            fix="leave these out; hooks on `layers` see the output of each layer",
        )
        if not self.pre_process:
            hidden_states = self.input_tensor
        elif hidden_states is not None and self.expansion is not None:
            hidden_states = self.expansion(hidden_states)
        if hidden_states is None:
            raise RuntimeError("a stage without embedding has no input: call set_input_tensor()")
        # A stage frees the data of its output after sending it, which a view could not do.
        hidden_states = make_viewless_tensor(hidden_states, requires_grad=True, keep_graph=True)
        if rotary_pos_emb is not None and rotary_pos_cos is None:
            # Once for all layers, in the dtype of queries and keys.
            freqs = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
            rotary_pos_cos, rotary_pos_sin = cos_sin(
                freqs, self.config.params_dtype, self.config.rotary_amplitude
            )
        names = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
        others: dict[Any, dict[str, Tensor]] = {}
        for own, angles in (other_rotary_pos_emb or {}).items():
            amplitude = 1.0 if "rotary_base" in dict(own) else self.config.rotary_amplitude
            cos, sin = cos_sin(angles, self.config.params_dtype, amplitude)
            others[own] = dict(zip(names, (angles, cos, sin), strict=True))
        common: dict[str, Any] = {
            "context_mask": context_mask,
            "rotary_pos_emb": rotary_pos_emb,
            "rotary_pos_cos": rotary_pos_cos,
            "rotary_pos_sin": rotary_pos_sin,
            "packed_seq_params": packed_seq_params,
            "inference_context": inference_context or inference_params,
            "padding_mask": padding_mask,
        }
        if token_ids is not None:
            common["token_ids"] = token_ids
        # Of this pass: a recomputation after the next micro batch finds the same keys. No `dict`,
        # since torch's FSDP2 passes a copy of a dict to a layer, and loses what the layer adds.
        if self.config.dsa_indexer_topk_freq > 1:
            common["chosen_keys"] = UserDict()
        if self.config.num_kv_shared_layers or self.config.kv_source_layers:
            common["keys_values"] = UserDict()
        if vectors_of_layers is not None:
            common["vectors_of_layers"] = vectors_of_layers

        def run(first: int, last: int) -> Callable[..., Any]:
            own_layers = self.layers[first:last]
            # Chosen now: a recomputation may run after the next micro batch, with other options.
            chosen = [self._options_of_layer(layer, common, others) for layer in own_layers]

            def layers(
                hidden: Tensor,
                mask: Tensor | None,
                context: Tensor | None,
                bias: Tensor | None,
                *added: Tensor,
            ) -> Any:
                for place, (layer, options) in enumerate(zip(own_layers, chosen, strict=True)):
                    call = self._captured[first + place] or layer
                    is_offloaded = first + place < self.config.num_offloaded_layers
                    with offloading(is_offloaded, layer):
                        hidden, context = call(
                            hidden, mask, context, attention_bias=bias, **options
                        )
                    if place < len(added):
                        states = equal_streams(added[place], self.config.num_residual_streams)
                        hidden = hidden + states.to(hidden.dtype)
                return hidden, context

            return layers

        offloads = self.config.offloads_activations and self.training
        with saving_activations(offloads, self.config.min_offloaded_tensor_size):
            for first, last, recomputes in self._segments():
                segment = run(first, last)
                added = added_states[first:last]
                if not recomputes:
                    hidden_states, context = segment(
                        hidden_states, attention_mask, context, attention_bias, *added
                    )
                    continue
                with offloading(last <= self.config.num_offloaded_layers):
                    hidden_states, context = checkpoint(
                        segment,
                        self.config.distribute_saved_activations,
                        hidden_states,
                        attention_mask,
                        context,
                        attention_bias,
                        *added,
                    )
        if self.contraction is not None:
            hidden_states = self.contraction(hidden_states)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
            hidden_states = make_viewless_tensor(hidden_states, requires_grad=True, keep_graph=True)
            hidden_states = in_compute_dtype(hidden_states, self.config)
        return hidden_states

    def _options_of_layer(
        self, layer: Any, common: dict[str, Any], others: Mapping[Any, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the arguments of one layer.

        Args:
            common: arguments of all layers.
            others: value of `config.rotary_of` -> arguments that replace them.
        """
        return common | others.get(self.config.rotary_of(layer.layer_number), {})

    def _segments(self) -> list[tuple[int, int, bool]]:
        """Return segments of layers: (first, last, whether to recompute them in backward)."""
        count = len(self.layers)
        if self.config.recompute_granularity != "full" or not self.training:
            return [(0, count, False)] if count else []
        length = self.config.recompute_num_layers or 1
        if self.config.recompute_method == "uniform":
            return [(i, min(i + length, count), True) for i in range(0, count, length)]
        few = min(length, count)
        segments = [(i, i + 1, True) for i in range(few)]
        return segments + ([(few, count, False)] if few < count else [])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Declare the layers as slices of stacks: key `layers.<name>`, layer axis first.

        With `metadata["non_homogeneous_layers"]`, and if layers are of several kinds or sizes, each
        layer has its own keys, `layers.<global index>.<name>`.
        """
        metadata = metadata or {}
        num_layers = len(self.stack)
        mixed = len(set(self.config.layer_kinds())) > 1 or bool(self.config.blocks)
        # Only hash layers have tables, and layers that share keys have no projection to them.
        mixed = mixed or self.config.moe_n_hash_layers > 0 or self.config.num_kv_shared_layers > 0
        mixed = mixed or bool(self.config.kv_source_layers) or self.config.no_rope_latent_keys
        separate = metadata.get("non_homogeneous_layers", False) or mixed
        declared: ShardedStateDict = {}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer.layer_number, int), layer
            position = layer.layer_number - 1 - self.stack.start
            local = f"{prefix}layers.{index}."
            offsets = tuple(sharded_offsets)
            if not separate:
                assert not offsets, "layers inside another stack"
                offsets = ((0, position, num_layers),)
            part = sharded_state_dict_of(
                layer, local, offsets, metadata, pg_collection=self.pg_collection
            )
            stored = f"{prefix}layers.{position}." if separate else f"{prefix}layers."
            replace_key_prefixes(part, {local: stored})
            declared.update(part)
        for name in ("expansion", "contraction", "final_layernorm"):
            part = getattr(self, name)
            if not isinstance(part, nn.Module):
                continue
            declared.update(
                sharded_state_dict_of(
                    part,
                    f"{prefix}{name}.",
                    sharded_offsets,
                    metadata,
                    pg_collection=self.pg_collection,
                )
            )
        return declared


__all__ = [
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerLayer",
    "get_num_layers_to_build",
]
