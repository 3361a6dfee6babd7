"""One transformer layer: norm, attention, norm, MLP, each branch added to the residual stream.

Pre-norm residual layers: A. Radford et al., "Language Models are Unsupervised Multitask Learners"
(GPT-2), section 2.3. A layer opens a scope that keys its random draws, so that dropout does not
depend on the layout.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.dist_checkpointing.mapping import RankOffset, ShardedStateDict
from megatron.core.foundation.errors import refuse_given
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.inference.contexts.static_context import BaseInferenceContext
from megatron.core.offload.saved_activations import offloading
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    resolve_group,
    resolve_groups,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, checkpoint
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.alternating_updates import AlternatingUpdates
from megatron.core.transformer.config.stages import cp_comm_type_of_layer
from megatron.core.transformer.hyper_connection import HyperConnection, Residual
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.low_rank_residual import LowRankResidual
from megatron.core.transformer.module import GraphableMegatronModule, in_compute_dtype
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.per_layer_embedding import PerLayerInput, layer_scalar
from megatron.core.transformer.sharded_state import replace_key_prefixes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.torch_norm import Normed, normed_branch
from megatron.core.transformer.transformer_config import TransformerConfig


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the 0-based number of the first layer of a pipeline stage in the whole model."""
    if pp_rank is None:
        pp_rank = resolve_group(None, "pp").rank()
    return pipeline_layout(config).layers(pp_rank, vp_stage).start


@dataclass
class TransformerLayerSubmodules:
    """Parts of a layer. A part left as identity is absent."""

    input_layernorm: ModuleSpec | type | Any = IdentityOp
    self_attention: ModuleSpec | type | Any = IdentityOp
    self_attn_bda: ModuleSpec | type | Any = IdentityFuncOp
    pre_cross_attn_layernorm: ModuleSpec | type | Any = IdentityOp
    cross_attention: ModuleSpec | type | Any = IdentityOp
    cross_attn_bda: ModuleSpec | type | Any = IdentityFuncOp
    pre_mlp_layernorm: ModuleSpec | type | Any = IdentityOp
    mlp: ModuleSpec | type | Any = IdentityOp
    mlp_bda: ModuleSpec | type | Any = IdentityFuncOp
    post_self_attn_layernorm: ModuleSpec | type | Any = IdentityOp
    """Norm of the attention output before it is added, with `sandwich_norm` or `reordered_norm`."""
    post_mlp_layernorm: ModuleSpec | type | Any = IdentityOp
    """Norm of the MLP output before it is added, with `sandwich_norm`, `reordered_norm` or, of
    experts, `moe_output_norm`."""
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)
    """Prefixes of checkpoint keys to rename, so that specs with fused norms share checkpoints."""


class TransformerLayer(GraphableMegatronModule):
    """A layer built from a spec.

    Args:
        layer_number: 1-based number on this pipeline stage; with `add_layer_offset` the number of
            layers on earlier stages is added, so `self.layer_number` is global.
        hidden_dropout: overrides the config's.
        pp_layer_offset: number of layers on earlier stages; computed from the layout by default.
    """

    pg_collection: ProcessGroupCollection
    layer_scalar: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        is_mtp_layer: bool = False,
        add_layer_offset: bool = True,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.submodules_config = submodules
        self.pg_collection = resolve_groups(pg_collection)
        if not add_layer_offset:
            pp_layer_offset = 0
        elif pp_layer_offset is None:
            pp_layer_offset = get_transformer_layer_offset(
                config, vp_stage, self.pg_collection.pp.rank()
            )
        self.layer_number = layer_number + pp_layer_offset
        self.config = config = config.of_layer(self.layer_number)
        self.is_mtp_layer = is_mtp_layer
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout

        def norm(spec: Any) -> Any:
            return build_module(
                spec,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )

        self.is_reordered = config.is_reordered(self.layer_number)
        self.norms_outputs = config.sandwich_norm or self.is_reordered
        self.input_layernorm = norm(IdentityOp if self.is_reordered else submodules.input_layernorm)
        self.self_attention = build_module(
            submodules.self_attention,
            config=config,
            layer_number=self.layer_number,
            pg_collection=self.pg_collection,
            **self._context_parallel_options(),
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.has_mlp = get_module(submodules.mlp) is not IdentityOp
        self.has_mixer = get_module(submodules.self_attention) is not IdentityOp
        self.has_cross_attention = get_module(submodules.cross_attention) is not IdentityOp
        if self.has_cross_attention:
            self.pre_cross_attn_layernorm = norm(submodules.pre_cross_attn_layernorm)
            self.cross_attention = build_module(
                submodules.cross_attention,
                config=config,
                layer_number=self.layer_number,
                pg_collection=self.pg_collection,
            )
            self.cross_attn_bda = build_module(submodules.cross_attn_bda)
        has_experts = config.layer_kind(self.layer_number).has_experts
        self.norms_mlp = self.norms_outputs or (has_experts and config.moe_output_norm)
        norms_branches = has_experts and config.moe_branch_norms
        self.pre_mlp_layernorm = norm(
            IdentityOp
            if self.is_reordered or config.share_parallel_norm or norms_branches
            else submodules.pre_mlp_layernorm
        )
        if config.enable_mhc_connections and self.has_mixer:
            self.self_attention_hyper_connection = HyperConnection(config, self.pg_collection.tp)
        if config.enable_mhc_connections and self.has_mlp:
            self.mlp_hyper_connection = HyperConnection(config, self.pg_collection.tp)
        if config.altup_num_inputs > 1:
            self.alternating_updates = AlternatingUpdates(config, self.pg_collection.tp)
        if config.laurel_rank and self.has_mixer:
            self.laurel = LowRankResidual(config, self.pg_collection)
        if self.norms_outputs and self.has_mixer:
            self.post_self_attn_layernorm = norm(submodules.post_self_attn_layernorm)
        if self.norms_mlp and self.has_mlp:
            self.post_mlp_layernorm = norm(submodules.post_mlp_layernorm)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=self.pg_collection)
        self.has_experts = has_experts = isinstance(self.mlp, MoELayer)
        if has_experts:
            self.mlp.set_layer_number(self.layer_number)
        self.mlp_bda = build_module(submodules.mlp_bda)
        if config.per_layer_embed_dim:
            self.per_layer_input = PerLayerInput(config, self.pg_collection)
        if config.layer_scalar:
            self.register_buffer("layer_scalar", layer_scalar(config))

        # Expert layers have their own flag, --moe-layer-recompute.
        self.recomputes_mlp = config.recomputes("mlp") and not has_experts
        # If a norm's output is also read by another branch or is the residual, keep it.
        recomputes_norms = config.recomputes("layernorm") and not (
            config.apply_residual_connection_post_layernorm
            or config.share_parallel_norm
            or config.laurel_rank
        )
        self.recomputes_input_norm = recomputes_norms and not isinstance(
            self.input_layernorm, IdentityOp
        )
        # If the whole MLP is recomputed, its input (the norm's output) must be kept.
        self.recomputes_mlp_norm = (
            recomputes_norms
            and not self.recomputes_mlp
            and not (has_experts and config.moe_layer_recompute)
            and config.mlp_chunks_for_training == 1
            and not isinstance(self.pre_mlp_layernorm, IdentityOp)
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
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
        *,
        token_ids: Tensor | None = None,
        chosen_keys: MutableMapping[int, Tensor] | None = None,
        keys_values: MutableMapping[object, tuple[Tensor, Tensor]] | None = None,
        vectors_of_layers: Tensor | None = None,
        inference_params: BaseInferenceContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer on [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).

        With hyper-connections or AltUp the hidden states are n streams, [..., n*h].

        Args:
            context: input of cross attention, returned unchanged.
            padding_mask: bool [b, s/cp], True for padding, which is not routed.
            token_ids: int64 [b, s/cp], for layers that are routed by them (`moe_n_hash_layers`).
            chosen_keys, keys_values: keys chosen, and keys and values computed, by earlier layers
                of this pass; see `SparseAttention.forward` and `Attention.forward`.
            vectors_of_layers: [s, b, L, p], see `PerLayerEmbedding`.
        Returns:
            (hidden states of the input's shape, context).
        """
        refuse_given(
            "TransformerLayer.forward",
            {"rotary_pos_cos_sin": rotary_pos_cos_sin, "sequence_len_offset": sequence_len_offset},
            rule="positions are given as rotary_pos_emb",
            fix="leave these out",
        )
        with self._rng_scope(hidden_states):
            if self.config.altup_num_inputs > 1:
                predicted, hidden_states = self.alternating_updates(hidden_states)
            layer_input = hidden_states
            normed = None
            if self.has_mixer:
                is_sparse = self.config.layer_kind(self.layer_number).is_sparse
                hidden_states, normed = self._forward_attention(
                    hidden_states,
                    **({"chosen_keys": chosen_keys} if is_sparse else {}),
                    **({} if keys_values is None else {"keys_values": keys_values}),
                    attention_mask=attention_mask,
                    inference_context=inference_context or inference_params,
                    rotary_pos_emb=rotary_pos_emb,
                    rotary_pos_cos=rotary_pos_cos,
                    rotary_pos_sin=rotary_pos_sin,
                    attention_bias=attention_bias,
                    packed_seq_params=packed_seq_params,
                )
            if self.has_cross_attention:
                hidden_states = self._forward_cross_attention(hidden_states, context, context_mask)
            if self.has_mlp:
                mlp_input = layer_input if self.config.use_parallel_residual else hidden_states
                options = {
                    "padding_mask": padding_mask,
                    "packed_seq_params": packed_seq_params,
                    "token_ids": token_ids,
                }
                hidden_states = self._forward_mlp(mlp_input, hidden_states, normed, options)
            if self.config.altup_num_inputs > 1:
                hidden_states = self.alternating_updates.corrected(predicted, hidden_states)
            if vectors_of_layers is not None:
                own = vectors_of_layers[:, :, self.layer_number - 1]
                hidden_states = self.per_layer_input(hidden_states, own)
            if self.config.layer_scalar:
                hidden_states = hidden_states * self.layer_scalar
            return hidden_states, context

    def _context_parallel_options(self) -> dict[str, Any]:
        """Return the arguments of an attention under context parallelism."""
        kind = cp_comm_type_of_layer(self.config, self.layer_number)
        if kind is None or not self.config.layer_kind(self.layer_number).attends:
            return {}
        return {"cp_comm_type": kind}

    def _rng_scope(self, hidden_states: Tensor) -> AbstractContextManager[None]:
        """Key the random draws inside by this layer, if there are any."""
        if not (self.training or self.config.moe_router_force_load_balancing):
            return nullcontext()
        sp = self.pg_collection.tp if self.config.sequence_parallel else SINGLE_RANK
        shard = sequence_shard_of_rank(
            hidden_states.shape[0], cp=self.pg_collection.microbatch_cp, sp=sp
        )
        return rng_state().in_scope("decoder", self.layer_number, rows=shard)

    def _add(
        self, bda: Any, output_with_bias: Any, residual: Tensor | Residual, norm: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return residual + m * dropout(output + bias) with the factor m of `residual_multiplier`,
        and its norm if one kernel computes both."""
        if isinstance(residual, Residual):
            zeros = torch.zeros_like(output_with_bias[0], dtype=residual.dtype)
            output, _ = self._add(bda, output_with_bias, zeros)
            return residual.plus(output), None
        factor = self.config.residual_multiplier
        if factor != 1.0:
            output, bias = output_with_bias
            output_with_bias = output * factor, None if bias is None else bias * factor
        if norm is None or not self._adds_and_norms(bda, norm, output_with_bias[0], residual):
            add = bda(self.training, self.config.bias_dropout_fusion)
            return add(output_with_bias, residual, self.hidden_dropout), None
        output, bias = output_with_bias
        total, normed = norm(output, residual, bias)
        return total, normed

    def _adds_and_norms(self, bda: Any, norm: Any, output: Tensor, residual: Tensor) -> bool:
        """Whether the norm follows the sum [s, b, h] directly, and one kernel computes both."""
        drops = self.training and self.hidden_dropout > 0.0
        is_apart = (
            drops
            or self.has_cross_attention
            or self.config.use_parallel_residual
            or self.recomputes_mlp_norm
            or bda is not get_bias_dropout_add
            or not isinstance(norm, Norm)
            or output.dtype != residual.dtype
        )
        return not is_apart and norm.adds(residual)

    def _normed(self, norm: Any, x: Tensor, *, recomputes: bool = False) -> Normed:
        """Return the norm of a branch's input.

        Args:
            recomputes: drop the output after the branch (`CheckpointWithoutOutput`).
        """

        def for_branch(x: Tensor) -> Tensor:
            return in_compute_dtype(norm(x), self.config)

        if recomputes and self.training:
            dropped = CheckpointWithoutOutput()
            return Normed(dropped.checkpoint(for_branch, x), None, dropped)
        output = norm(x)
        return Normed(in_compute_dtype(output, self.config), output, None)

    def _streams(self, hidden_states: Tensor, name: str) -> tuple[Tensor, Tensor | Residual]:
        """Return the input of a branch, and the residual that its output is added to."""
        if not self.config.enable_mhc_connections:
            return hidden_states, hidden_states
        found: tuple[Tensor, Residual] = getattr(self, name)(hidden_states)
        return found

    def _residual(self, hidden_states: Tensor | Residual, normed: Normed) -> Tensor | Residual:
        """Return the residual that a branch is added to."""
        residual = hidden_states
        if isinstance(residual, Residual):
            return residual
        if self.config.apply_residual_connection_post_layernorm:
            assert normed.output is not None, "the residual stream was dropped"
            residual = normed.output
        return residual.float() if self.config.fp32_residual_connection else residual

    def _forward_attention(
        self, hidden_states: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream [s, b, h] with attention added, and the norm that the MLP
        reads or None."""
        branch_input, residual = self._streams(hidden_states, "self_attention_hyper_connection")
        with offloading(self.config.offloads("attn_norm"), self.input_layernorm):
            normed = self._normed(
                self.input_layernorm, branch_input, recomputes=self.recomputes_input_norm
            )
        output = self.self_attention(normed.branch, **kwargs)
        normed.drop_after(output[0])
        if self.norms_outputs:
            output = normed_branch(self.post_self_attn_layernorm, *output)
        residual = self._residual(residual, normed)
        norm = None if self.config.laurel_rank else self.pre_mlp_layernorm
        added, norm_of_sum = self._add(self.self_attn_bda, output, residual, norm)
        if self.config.laurel_rank:
            added = self.laurel.added(added, normed.branch)
        return added, normed.output if self.config.share_parallel_norm else norm_of_sum

    def _forward_cross_attention(
        self, hidden_states: Tensor, context: Tensor | None, context_mask: Tensor | None
    ) -> Tensor:
        normed = self._normed(self.pre_cross_attn_layernorm, hidden_states)
        output = self.cross_attention(
            normed.branch, attention_mask=context_mask, key_value_states=context
        )
        return self._add(self.cross_attn_bda, output, self._residual(hidden_states, normed))[0]

    def _forward_mlp(
        self,
        mlp_input: Tensor,
        hidden_states: Tensor,
        norm_of_input: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Return the residual stream [s, b, h] with the MLP of its input added.

        Args:
            norm_of_input: [s, b, h], if the attention branch has computed it.
            options: arguments for layers of experts.
        """
        residual: Tensor | Residual = hidden_states
        if self.config.enable_mhc_connections:
            mlp_input, residual = self._streams(hidden_states, "mlp_hyper_connection")
        if norm_of_input is None:
            with offloading(self.config.offloads("mlp_norm"), self.pre_mlp_layernorm):
                normed = self._normed(
                    self.pre_mlp_layernorm, mlp_input, recomputes=self.recomputes_mlp_norm
                )
        else:
            normed = Normed(in_compute_dtype(norm_of_input, self.config), norm_of_input, None)
        if self.config.mlp_chunks_for_training > 1 and self.training:
            output = self._mlp_in_chunks(normed.branch)
        elif self.recomputes_mlp and self.training:
            output = checkpoint(self.mlp, False, normed.branch)
        else:
            given = {n: value for n, value in options.items() if value is not None}
            output = self.mlp(normed.branch, **(given if self.has_experts else {}))
        normed.drop_after(output[0])
        if self.norms_mlp:
            output = normed_branch(self.post_mlp_layernorm, *output)
        return self._add(self.mlp_bda, output, self._residual(residual, normed))[0]

    def _mlp_in_chunks(self, normed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the MLP on one chunk of tokens after the other; backward recomputes each chunk."""
        outputs, begin, num_tokens = [], 0, normed.shape[0]
        for chunk in normed.chunk(self.config.mlp_chunks_for_training):
            with rng_state().in_token_range(begin, begin + len(chunk), num_tokens):
                outputs.append(checkpoint(self.mlp, False, chunk))
            begin += len(chunk)
        return torch.cat([output for output, _ in outputs]), outputs[0][1]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Declare the layer's state, with the key renames of the spec."""
        declared = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        renames = self.submodules_config.sharded_state_dict_keys_map
        replace_key_prefixes(declared, {prefix + a: prefix + b for a, b in renames.items()})
        return declared
