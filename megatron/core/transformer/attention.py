"""Self-attention: projections around a core, with grouped queries, QK norm and rotary positions.

Grouped queries: J. Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from
Multi-Head Checkpoints", arXiv 2305.13245. QK norm: M. Dehghani et al., "Scaling Vision
Transformers to 22 Billion Parameters", section 2, arXiv 2302.05442. Output gate: Z. Qiu et al.,
"Gated Attention for Large Language Models", arXiv 2505.06708, in the form of Qwen3-Next: the query
projection also gives a gate for each channel of a head's output.

Legend: s sequence, b micro-batch, h hidden, n query heads, g key/value groups, d head dim. The
projection packs rows by group: n/g query heads, with an output gate n/g gate heads, one key head,
one value head; tensor parallelism splits whole groups, or, with more ranks than groups, equal runs
of rows that are gathered.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.errors import refuse_given
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.offload.saved_activations import offloading
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.dot_product_attention import GATES, gated, reader_of_cache
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.query_scale import query_scale
from megatron.core.transformer.rotary import Rotary, angles_of, positions_of_rank, rotate
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import L2Norm, RMSNormAcrossHeads
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


@dataclass
class SelfAttentionSubmodules:
    """Parts of a self-attention."""

    linear_qkv: ModuleSpec | type | Any = None
    core_attention: ModuleSpec | type | Any = None
    linear_proj: ModuleSpec | type | Any = None
    q_layernorm: ModuleSpec | type | Any = None
    k_layernorm: ModuleSpec | type | Any = None


class Attention(MegatronModule):
    """Projections to queries, keys and values, the attention core, and the projection back.

    A subclass builds its projections in `build_projections`, where it also sets `output_width` (of
    all heads together) and, if it overrides the config's, `softmax_scale`; it applies the
    projections in `get_query_key_value_tensors`.

    Args:
        layer_number: 1-based number of the layer in the whole model.
        attn_mask_type: type of the mask; specs of decoders pass `causal`.
    """

    pg_collection: ProcessGroupCollection
    output_width: int
    softmax_scale: float | None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.pg_collection = resolve_groups(pg_collection)
        self.num_attention_heads_per_partition = divide(
            config.num_attention_heads, self.pg_collection.tp.size()
        )
        self.softmax_scale = config.softmax_scale
        if config.softmax_scale_local and config.window_of(layer_number) is not None:
            self.softmax_scale = config.softmax_scale_local
        self.num_late_inputs = int(config.attention_output_gate)
        self.query_scale = query_scale(config, layer_number, self.pg_collection.tp)
        self.build_projections(submodules)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=self.softmax_scale,
            pg_collection=self.pg_collection,
        )
        self.linear_proj = self.linear(
            submodules.linear_proj,
            self.output_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
        )
        self.recomputes_core = config.recomputes("core_attn")

    def build_projections(self, submodules: Any) -> None:
        """Build the layers that `get_query_key_value_tensors` uses."""
        raise NotImplementedError

    def linear(self, spec: object, rows: int, columns: int, **options: object) -> Any:
        """Build a linear layer from its spec."""
        options.setdefault("init_method", self.config.init_method)
        tp = self.pg_collection.tp
        return build_module(spec, rows, columns, config=self.config, tp_group=tp, **options)

    def norm(self, spec: object, width: int, *, is_sharded: bool, eps: float | None = None) -> Any:
        """Build a norm of the last `width` channels from its spec; None without one.

        Args:
            is_sharded: each tensor-parallel rank norms different tokens or heads, so that the
                gradients of its weights are partial sums.
            eps: default `config.layernorm_epsilon`.
        """
        if spec is None:
            return None
        eps = self.config.layernorm_epsilon if eps is None else eps
        norm = build_module(spec, config=self.config, hidden_size=width, eps=eps)
        if is_sharded:
            for parameter in norm.parameters():
                meta = get_param_meta(parameter)
                set_param_meta(parameter, replace(meta, partial_grad_axes=("tp",)))
        return norm

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Project hidden states to this rank's heads.

        Args:
            positions: [s, b], position of each token in its sequence; default 0, 1, 2, ...
        Returns:
            query, key, value, further inputs of the core, and with `config.attention_output_gate`
            the gate.
        """
        raise NotImplementedError

    def extra_cache_entries(self, extra: list[Tensor]) -> list[Tensor]:
        """Return the extra inputs of the core, as [s, b, g, d], that a cache stores."""
        return []

    def query_key_row_factors(self, gamma: Tensor, alpha: float) -> list[tuple[Any, Tensor]]:
        """Return projections and factors on their rows that scale the logits of heads.

        Args:
            gamma: [n] in (0, 1], the factor on the logits of each head of the model.
            alpha: the queries take gamma**alpha, the keys the rest.
        Returns:
            (linear layer, [rows of the full weight]), ...
        """
        raise NotImplementedError

    def get_rotated_qkv(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        positions: Tensor | None,
        rotary_pos_emb: Rotary,
    ) -> tuple[Tensor, ...]:
        """Return the tensors of `get_query_key_value_tensors`, query and key rotated.

        Args:
            rotary_pos_emb: angles [s, 1, 1, r], their cosine and their sine.
        """
        return self.get_query_key_value_tensors(hidden_states, key_value_states, positions)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: StaticInferenceContext | None = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: object = None,
        *,
        chosen_keys: MutableMapping[int, Tensor] | None = None,
        keys_values: MutableMapping[object, tuple[Tensor, Tensor]] | None = None,
        inference_params: StaticInferenceContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
            attention_mask: bool, True where a key is hidden; see the core attention.
            inference_context: a cache of keys and values, or None; new ones are added to it.
            rotary_pos_emb: angles [s, 1 or b, 1, r] of the positions of the tokens, or None.
                `rotary_pos_cos` and `_sin`, if given, are their cosine and sine.
            chosen_keys: for a core of sparse attention; see `SparseAttention.forward`.
            keys_values: window -> rotated keys and values of the last layer with this window, for
                layers that share them. A layer with keys of its own replaces the entry.
        Returns:
            (output of the input's shape, bias [h] that is still to be added, or None).
        """
        refuse_given(
            "SelfAttention.forward",
            {"rotary_pos_cos_sin": rotary_pos_cos_sin, "sequence_len_offset": sequence_len_offset},
            rule="positions are given as rotary_pos_emb",
            fix="leave these out",
        )
        context = inference_context if inference_context is not None else inference_params
        positions = None if context is None else context.positions
        if positions is None and self.query_scale is not None:
            positions = positions_of_rank(
                hidden_states, self.config, self.pg_collection, packed_seq_params
            )
        rotary = rotary_pos_emb, rotary_pos_cos, rotary_pos_sin
        query, key, value, *others = self.get_rotated_qkv(
            hidden_states, key_value_states, positions, rotary
        )
        if self.query_scale is not None:
            query = self.query_scale(query, positions)
        if keys_values is not None:
            window = self.config.window_of(self.layer_number)
            if key is not None:
                keys_values[window] = key, value
            key, value = keys_values[window]
        split = len(others) - self.num_late_inputs
        extra, late = others[:split], others[split:]
        sharing = {} if chosen_keys is None else {"chosen_keys": chosen_keys}
        if context is not None:
            entries = self.extra_cache_entries(extra)
            cached = context.store(self.layer_number, key, value, *entries)
            if not context.is_fresh:
                core = reader_of_cache(self.core_attention)
                chunk = self.config.chunk_of(self.layer_number)
                hidden = context.masked_keys(core.window(self.attn_mask_type)[0], chunk)
                attended = core.attend_to_cache(query, cached, extra, hidden=hidden, **sharing)
                return self.linear_proj(self.after_core(attended, *late))

        def attend(mask: Tensor | None, bias: Tensor | None, *tensors: Any) -> Any:
            query, key, value, *extra = tensors
            return self.core_attention(
                query,
                key,
                value,
                mask,
                *extra,
                attn_mask_type=self.attn_mask_type,
                attention_bias=bias,
                packed_seq_params=packed_seq_params,
                **sharing,
            )

        given = (attention_mask, attention_bias, query, key, value, *extra)
        if self.recomputes_core and self.training:
            attended = checkpoint(attend, False, *given)
        else:
            with offloading(self.config.offloads("core_attn"), self.core_attention):
                attended = attend(*given)
        self.drop_query_key_value(attended)
        attended = self.after_core(attended, *late)
        with offloading(self.config.offloads("attn_proj"), self.linear_proj):
            return self.linear_proj(attended)

    def after_core(self, attended: Tensor, *late: Tensor) -> Tensor:
        """Return the input [s, b, n/tp * d] of `linear_proj` from the core's output, of this shape,
        and the last `num_late_inputs` projected tensors: here the gate, if there is one."""
        act = GATES[self.config.attention_gate_activation]
        return gated(attended, *late, in_vectors=self.config.layout_invariant_mode, act=act)

    def drop_query_key_value(self, attended: Tensor) -> None:
        """Free query, key and value, if they are recomputed before the backward of the core."""


class SelfAttention(Attention):
    """Attention of a sequence to itself through one projection to queries, keys and values."""

    def build_projections(self, submodules: SelfAttentionSubmodules) -> None:
        """Build `linear_qkv` and the norms of heads."""
        config = self.config
        tp_size = self.pg_collection.tp.size()
        groups, head = config.num_query_groups, config.kv_channels
        assert groups and head
        self.hidden_size_per_attention_head = head
        self.num_query_groups_per_partition = max(1, groups // tp_size)
        self.queries_per_group = config.num_attention_heads // groups
        value_head = config.v_channels or head
        self.output_width = config.num_attention_heads * value_head
        queries = self.queries_per_group * head
        self.gate_width = 1 if config.attention_gate_by_head else head
        gates = [self.queries_per_group * self.gate_width] * config.attention_output_gate
        keys = [head] if config.attention_k_eq_v else [head, value_head]
        shares = config.shares_key_value(self.layer_number)
        self.rows_of_group = (queries, *gates, *([] if shares else keys))
        """Number of rows of a group: queries; if the layer has them, gates, key, value."""
        self.linear_qkv = self.linear(
            submodules.linear_qkv,
            config.hidden_size,
            groups * sum(self.rows_of_group),
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
        )
        weight = getattr(self.linear_qkv, "weight", None)
        if weight is not None:
            meta = replace(get_param_meta(weight), fused_row_sizes=self.rows_of_group)
            set_param_meta(weight, meta)
        # Each tensor-parallel rank normalises its own heads, with or without sequence parallelism.
        norms, widths = (submodules.q_layernorm, submodules.k_layernorm), [head, head]
        if config.qk_l2_norm:
            norms = (L2Norm, L2Norm) if config.rotates_in(self.layer_number) else (None, None)
        elif config.qk_layernorm_across_heads and None not in norms:
            across = {"tp_group": self.pg_collection.tp}
            norms = (ModuleSpec(module=RMSNormAcrossHeads, params=across),) * 2
            widths = [config.num_attention_heads * head, groups * head]
        of_keys = (None, None) if shares else (norms[1], L2Norm if config.v_l2_norm else None)
        self.q_layernorm, self.k_layernorm, self.v_layernorm = (
            self.norm(spec, width, is_sharded=True)
            for spec, width in zip((norms[0], *of_keys), [*widths, head], strict=True)
        )
        self.uses_rotary = config.rotates_in(self.layer_number)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Project to this rank's heads, before rotation; the QK norm is applied unless it follows.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        Returns:
            query [s, b, n/tp, d]; key and value [s, b, max(1, g/tp), d], or None in a layer that
            shares them; with `config.attention_output_gate` the gate [s, b, n/tp * d], or
            [s, b, n/tp] with `config.attention_gate_by_head`.
        """
        rule = "self-attention projects keys and values from the queries' own sequence"
        given = {"key_value_states": key_value_states}
        refuse_given("SelfAttention", given, rule=rule, fix="leave it out")
        with offloading(self.config.offloads("qkv_linear"), self.linear_qkv):
            packed, _ = self.linear_qkv(hidden_states)
        query, key, value, *gate = self._unpack(packed)
        if self.v_layernorm is not None:
            value = self.v_layernorm(value)
        if self.config.attention_value_scale != 1.0 and value is not None:
            value = value * self.config.attention_value_scale
        if not self.config.qk_layernorm_after_rope:
            query, key = self._normed(query, key)
        return query, key, value, *gate

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the QK norm, if there is one."""
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key

    def get_rotated_qkv(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        positions: Tensor | None,
        rotary_pos_emb: Rotary,
    ) -> tuple[Tensor, ...]:
        """Project [s, b, h] and rotate; without gradients the r+1 heads of a group in one call."""
        _, cos, sin = rotary_pos_emb
        has_norms = self.q_layernorm is not None or self.k_layernorm is not None
        in_parts = has_norms or not self.uses_rotary or key_value_states is not None
        in_parts = in_parts or len(self.rows_of_group) != 3 or bool(self.config.v_channels)
        in_parts = in_parts or self.config.attention_value_scale != 1.0 or self.config.v_l2_norm
        shares_group = self.pg_collection.tp.size() > (self.config.num_query_groups or 1)
        config = self.config
        how: Any = {"interleaved": config.rotary_interleaved, "fuses": config.apply_rope_fusion}
        if torch.is_grad_enabled() or in_parts or shares_group or cos is None or sin is None:
            cached = () if positions is None else (positions,)  # overrides need not take them
            query, key, *others = self.get_query_key_value_tensors(
                hidden_states, key_value_states, *cached
            )
            turn = angles_of(rotary_pos_emb, query.dtype, self.config)
            if turn is not None and self.uses_rotary:
                query = rotate(query, *turn, **how)
                key = key if key is None else rotate(key, *turn, **how)
            if self.config.qk_layernorm_after_rope:
                query, key = self._normed(query, key)
            return query, key, *others
        packed, _ = self.linear_qkv(hidden_states)
        s, b, _ = packed.shape
        d, r = self.hidden_size_per_attention_head, self.queries_per_group
        grouped = packed.view(s, b, -1, r + 2, d)
        rotated = rotate(grouped.narrow(3, 0, r + 1), cos.unsqueeze(2), sin.unsqueeze(2), **how)
        query = rotated.narrow(3, 0, r).reshape(s, b, -1, d)
        return query, rotated.select(3, r), grouped.select(3, r + 1)

    def query_key_row_factors(self, gamma: Tensor, alpha: float) -> list[tuple[Any, Tensor]]:
        """Scale a group by the smallest gamma [n] of its heads, because the heads share a key."""
        of_group = gamma.view(-1, self.queries_per_group).amin(1, keepdim=True)
        others = torch.ones_like(of_group)
        gates = [others] * (len(self.rows_of_group) - 3)
        factors = (of_group.pow(alpha), *gates, of_group.pow(1 - alpha), others)
        sized = zip(factors, self.rows_of_group, strict=True)
        rows = torch.cat([factor.expand(-1, size) for factor, size in sized], 1)
        return [(self.linear_qkv, rows.flatten())]

    def _unpack(self, packed: Tensor) -> tuple[Any, ...]:
        """Split the projection into query, key and value heads, and gates if it has any."""
        s, b, _ = packed.shape
        d, rows = self.hidden_size_per_attention_head, list(self.rows_of_group)
        tp, part, groups = self.pg_collection.tp, 0, self.config.num_query_groups or 1
        if tp.size() > groups:
            # Several ranks share a group: its key and value may be on another rank.
            packed = all_gather_last_dim_from_tensor_parallel_region(packed, group=tp)
            group, part = divmod(tp.rank(), tp.size() // groups)
            grouped = packed.view(s, b, groups, sum(rows))[:, :, group : group + 1]
        else:
            grouped = packed.view(s, b, groups // tp.size(), sum(rows))
        parts = torch.split(grouped, rows, dim=3)
        local = self.num_attention_heads_per_partition
        first_key = 1 + self.config.attention_output_gate
        query, *gate = (
            heads.reshape(s, b, -1)[:, :, part * local * width : (part + 1) * local * width]
            for heads, width in zip(parts[:first_key], (d, self.gate_width), strict=False)
        )
        keys = parts[first_key:] or (None,)
        return query.view(s, b, local, d), keys[0], keys[-1], *gate
