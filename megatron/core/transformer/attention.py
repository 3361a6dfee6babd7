"""Self-attention: projections around a core, with grouped queries, QK norm and rotary positions.

Grouped queries: J. Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from
Multi-Head Checkpoints", arXiv 2305.13245. QK norm: M. Dehghani et al., "Scaling Vision
Transformers to 22 Billion Parameters", section 2, arXiv 2302.05442.

Legend: s sequence, b micro-batch, h hidden, n query heads, g key/value groups, d head dim. The
projection packs rows by group: n/g query heads, one key head, one value head; tensor parallelism
splits whole groups, or, with more ranks than groups, equal runs of rows that are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.param_meta import get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.rotary import cos_sin, rotate
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide, get_pg_rank, get_pg_size


@dataclass
class SelfAttentionSubmodules:
    """Parts of a self-attention."""

    linear_qkv: ModuleSpec | type | Any = None
    core_attention: ModuleSpec | type | Any = None
    linear_proj: ModuleSpec | type | Any = None
    q_layernorm: ModuleSpec | type | Any = None
    k_layernorm: ModuleSpec | type | Any = None


class SelfAttention(MegatronModule):
    """Attention of a sequence to itself.

    A subclass with other projections overrides `get_query_key_value_tensors`.

    Args:
        layer_number: 1-based number of the layer in the whole model.
        attn_mask_type: what the mask hides by itself; specs of decoders pass `causal`.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
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
        self.pg_collection = pg_collection or ProcessGroupCollection.current()
        tp = self.pg_collection.tp
        tp_size, groups, head = get_pg_size(tp), config.num_query_groups, config.kv_channels
        assert groups and head
        self.hidden_size_per_attention_head = head
        self.num_attention_heads_per_partition = divide(config.num_attention_heads, tp_size)
        self.num_query_groups_per_partition = max(1, groups // tp_size)
        self.queries_per_group = config.num_attention_heads // groups

        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            (config.num_attention_heads + 2 * groups) * head,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=tp,
            pg_collection=self.pg_collection,
        )
        weight = getattr(self.linear_qkv, "weight", None)
        if weight is not None:
            rows = (self.queries_per_group * head, head, head)
            set_param_meta(weight, replace(get_param_meta(weight), stacked_rows=rows))
        self.q_layernorm = self._head_norm(submodules.q_layernorm)
        self.k_layernorm = self._head_norm(submodules.k_layernorm)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=config.softmax_scale,
            pg_collection=self.pg_collection,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * head,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=tp,
            pg_collection=self.pg_collection,
        )
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or []
        )
        skips = config.no_rope_freq
        self.uses_rotary = not (skips and skips[min(layer_number, len(skips)) - 1])

    def _head_norm(self, spec: Any) -> torch.nn.Module | None:
        if spec is None:
            return None
        norm = build_module(
            spec,
            config=self.config,
            hidden_size=self.hidden_size_per_attention_head,
            eps=self.config.layernorm_epsilon,
        )
        for parameter in norm.parameters():
            # Each tensor-parallel rank normalises its own heads, with or without sequence
            # parallelism.
            meta = get_param_meta(parameter)
            set_param_meta(parameter, replace(meta, grad_sum_axes=("tp",)))
        return norm

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project to this rank's heads, QK norm applied, before rotation.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        Returns:
            query [s, b, n/tp, d]; key and value [s, b, max(1, g/tp), d].
        """
        packed, _ = self.linear_qkv(hidden_states)
        query, key, value = self._unpack(packed)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value

    def _unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut the rows of the projection into query, key and value heads."""
        s, b, _ = packed.shape
        d, r = self.hidden_size_per_attention_head, self.queries_per_group
        tp = self.pg_collection.tp
        groups, tp_size = self.config.num_query_groups, get_pg_size(tp)
        assert groups
        local = self.num_attention_heads_per_partition
        if tp_size <= groups:
            grouped = packed.view(s, b, groups // tp_size, r + 2, d)
            query, key, value = torch.split(grouped, [r, 1, 1], dim=3)
            return query.reshape(s, b, local, d), key.squeeze(3), value.squeeze(3)
        # Several ranks share a group: its key and value rows may lie on another rank.
        packed = all_gather_last_dim_from_tensor_parallel_region(packed, group=tp)
        ranks_per_group = tp_size // groups
        group, part = divmod(get_pg_rank(tp), ranks_per_group)
        grouped = packed.view(s, b, groups, r + 2, d)[:, :, group]
        before = part * local
        _, query, _, key, value = torch.split(
            grouped, [before, local, r - before - local, 1, 1], dim=2
        )
        return query, key, value

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
            attention_mask: bool, True where a key is hidden; see the core attention.
            rotary_pos_emb: angles [s, 1, 1, r] of the positions that the rows of the sequence
                have, or None. `rotary_pos_cos` and `_sin`, if given, are their cosine and sine,
                computed once for all layers.
        Returns:
            (output of the input's shape, bias [h] that is still to be added, or None).
        """
        if inference_context is not None or inference_params is not None:
            raise ConfigError(
                "an inference context reached the attention.",
                rule="the model has no key/value cache: it recomputes the whole prefix",
                fix="call the model without inference_context",
            )
        query, key, value = self.get_query_key_value_tensors(hidden_states, key_value_states)
        if rotary_pos_emb is not None and self.uses_rotary:
            if rotary_pos_cos is None or rotary_pos_sin is None:
                angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
                rotary_pos_cos, rotary_pos_sin = cos_sin(angles, query.dtype)
            interleaved = self.config.rotary_interleaved
            query = rotate(query, rotary_pos_cos, rotary_pos_sin, interleaved)
            key = rotate(key, rotary_pos_cos, rotary_pos_sin, interleaved)

        def core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return self.core_attention(
                query,
                key,
                value,
                mask,
                attn_mask_type=self.attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
            )

        if self.recomputes_core and self.training:
            attended = checkpoint(core, False, query, key, value, attention_mask)
        else:
            attended = core(query, key, value, attention_mask)
        return self.linear_proj(attended)
