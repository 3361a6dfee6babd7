"""Multi-latent attention: keys and values are made from one short vector per token.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
sections 2.1.2 and 2.1.3, arXiv 2405.04434. Each head's query and key have a part without
position, made from the latents, and a rotary part, whose key is the same for all heads.

Tensor parallelism splits heads: the projections up from the latents are column-parallel, those
down to the latents and their norms are replicated. Under sequence parallelism the latter see this
rank's rows, so their gradients are summed over the tensor-parallel ranks.

Legend: s sequence, b micro batch, h hidden, n heads, d width of the part without position, p of
the rotary part, e of a value head, c width of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import rows_of_rank
from megatron.core.param_meta import get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.rotary import cos_sin, rotate
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.yarn import yarn_attention_factor, yarn_inverse_frequencies
from megatron.core.utils import divide, get_pg_size


@dataclass
class MLASelfAttentionSubmodules:
    """Parts of a multi-latent attention."""

    linear_q_proj: ModuleSpec | type | Any = None
    linear_q_down_proj: ModuleSpec | type | Any = None
    linear_q_up_proj: ModuleSpec | type | Any = None
    linear_kv_down_proj: ModuleSpec | type | Any = None
    linear_kv_up_proj: ModuleSpec | type | Any = None
    core_attention: ModuleSpec | type | Any = None
    linear_proj: ModuleSpec | type | Any = None
    q_layernorm: ModuleSpec | type | Any = None
    kv_layernorm: ModuleSpec | type | Any = None


class MLASelfAttention(MegatronModule):
    """Attention of a sequence to itself through latents.

    Args:
        layer_number: 1-based number of the layer in the whole model.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        self.pg_collection = pg_collection or ProcessGroupCollection.current()
        tp, heads = self.pg_collection.tp, config.num_attention_heads
        self.num_attention_heads_per_partition = divide(heads, get_pg_size(tp))
        self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim

        def linear(spec: Any, rows: int, columns: int, **options: Any) -> Any:
            init_method = options.pop("init_method", config.init_method)
            return build_module(
                spec, rows, columns, config=config, init_method=init_method, tp_group=tp,
                pg_collection=self.pg_collection, **options,
            )  # fmt: skip

        column = {"gather_output": False, "bias": False, "skip_bias_add": False}
        queries = heads * self.q_head_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = linear(
                submodules.linear_q_proj, config.hidden_size, queries, **column
            )
        else:
            self.linear_q_down_proj = linear(
                submodules.linear_q_down_proj, config.hidden_size, config.q_lora_rank
            )
            self.q_layernorm = self._latent_norm(submodules.q_layernorm, config.q_lora_rank)
            self.linear_q_up_proj = linear(
                submodules.linear_q_up_proj, config.q_lora_rank, queries, **column
            )
        latent = config.kv_lora_rank
        self.linear_kv_down_proj = linear(
            submodules.linear_kv_down_proj, config.hidden_size, latent + config.qk_pos_emb_head_dim
        )
        self.kv_layernorm = self._latent_norm(submodules.kv_layernorm, latent)
        self.linear_kv_up_proj = linear(
            submodules.linear_kv_up_proj,
            latent,
            heads * (config.qk_head_dim + config.v_head_dim),
            **column,
        )
        inverse, self.rotary_factor, scale = _rotary_settings(config)
        self.inverse_frequencies = inverse  # not a buffer: half precision must not round it
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=self.q_head_dim**-0.5 * scale,
            pg_collection=self.pg_collection,
        )
        self.linear_proj = linear(
            submodules.linear_proj,
            heads * config.v_head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in (
            config.recompute_modules or []
        )

    def _latent_norm(self, spec: Any, width: int) -> nn.Module:
        norm = build_module(
            spec, config=self.config, hidden_size=width, eps=self.config.layernorm_epsilon
        )
        if self.config.sequence_parallel:
            for parameter in norm.parameters():
                meta = get_param_meta(parameter)
                set_param_meta(parameter, replace(meta, grad_sum_axes=("tp",)))
        return norm

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project to this rank's heads and rotate.

        Args:
            hidden_states: [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).
        Returns:
            query and key [s/cp, b, n/tp, d+p], value [s/cp, b, n/tp, e].
        """
        config, heads = self.config, self.num_attention_heads_per_partition
        d, p, e = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            latent, _ = self.linear_q_down_proj(hidden_states)
            query, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        joined, _ = self.linear_kv_down_proj(hidden_states)
        latent, shared_key = joined.split([config.kv_lora_rank, p], -1)
        keys_and_values, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        shared_key = self._for_all_heads(shared_key)

        s, b = query.shape[:2]
        query = query.view(s, b, heads, d + p)
        key, value = keys_and_values.view(s, b, heads, d + e).split([d, e], -1)
        cos, sin = self._angles(s, query)
        interleaved = config.rotary_interleaved
        turned = rotate(query[..., d:], cos, sin, interleaved)
        shared_key = rotate(shared_key.unsqueeze(2), cos, sin, interleaved)
        query = torch.cat((query[..., :d], turned), -1)
        key = torch.cat((key, shared_key.expand(s, b, heads, p)), -1)
        return query, key, value

    def _for_all_heads(self, shared_key: Tensor) -> Tensor:
        """Give every rank the shared rotary key of all rows; its gradient is summed over heads."""
        tp = self.pg_collection.tp
        if get_pg_size(tp) == 1:
            return shared_key
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(shared_key, group=tp)
        return copy_to_tensor_model_parallel_region(shared_key, group=tp)

    def _angles(self, num_rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [s/cp, 1, 1, p] of the positions that the rows have."""
        positions = rows_of_rank(num_rows, self.pg_collection.cp).positions(like.device).float()
        if self.inverse_frequencies.device != like.device:
            self.inverse_frequencies = self.inverse_frequencies.to(like.device)
        angles = torch.outer(positions, self.inverse_frequencies)
        if self.config.rotary_interleaved:
            angles = angles.repeat_interleave(2, dim=1)
        else:
            angles = torch.cat((angles, angles), dim=1)
        cos, sin = cos_sin(angles[:, None, None, :], torch.float32)
        return (cos * self.rotary_factor).to(like.dtype), (sin * self.rotary_factor).to(like.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: arguments and results of `SelfAttention`; the rotary part has its own angles."""
        query, key, value = self.get_query_key_value_tensors(hidden_states)

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


def _rotary_settings(config: TransformerConfig) -> tuple[Tensor, float, float]:
    """Return inverse frequencies, the factor on cosine and sine, and the factor on the scores."""
    channels, base = config.qk_pos_emb_head_dim, config.rotary_base
    if config.rope_type == "rope":
        exponent = torch.arange(0, channels, 2, dtype=torch.float32) / channels
        return 1.0 / (base**exponent), 1.0, 1.0
    factor = config.rotary_scaling_factor
    inverse = yarn_inverse_frequencies(
        channels,
        base,
        factor=factor,
        original_context=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
    )
    # DeepSeek's form of YaRN's temperature: the whole head's share is a factor on the scores, and
    # the rotary part gets what its own strength adds to it.
    whole = yarn_attention_factor(factor, config.mscale_all_dim)
    return inverse, yarn_attention_factor(factor, config.mscale) / whole, whole**2
