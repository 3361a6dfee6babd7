"""Multi-latent attention: keys and values are made from one short vector per token.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
sections 2.1.2 and 2.1.3, arXiv 2405.04434. Each head's query and key have a part without
position, made from the latents, and a rotary part, whose key is the same for all heads.

Tensor parallelism splits heads: the projections up from the latents are column-parallel; the
projections down to the latents and their norms are replicated. Under sequence parallelism the
replicated layers process this rank's tokens, so their gradients are summed over the tensor-parallel
ranks.

Legend: s sequence, b micro batch, h hidden, n heads, d width of the part without position, p of
the rotary part, e of a value head, c width of a latent.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.kernels.registry import Request
from megatron.core.kernels.rotary import LATENT_ROTARY, UNFUSED
from megatron.core.offload.saved_activations import offloading
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.tensor_parallel.unit_products import copies
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.rotary import cos_sin, positions_of
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.yarn import yarn_attention_factor, yarn_of_config


class LatentRotary(nn.Module):
    """Cosine and sine of the rotary part of heads.

    Args:
        inverse_frequencies: [p/2]; not a buffer, because half precision must not round it.
        factor: factor on cosine and sine.
        has_exponents: frequencies are multiplied by the exponentials of a buffer, fp32 [p/2].
    """

    exponents: Tensor | None

    def __init__(
        self, inverse_frequencies: Tensor, factor: float = 1.0, *, has_exponents: bool = False
    ) -> None:
        super().__init__()
        self.inverse_frequencies, self.factor = inverse_frequencies, factor
        zeros = torch.zeros(len(inverse_frequencies)) if has_exponents else None
        self.register_buffer("exponents", zeros)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move and convert the module, but keep the exponents in fp32."""
        kept = self.exponents
        super()._apply(*args, **kwargs)
        if kept is not None and self.exponents is not None:
            self.exponents = kept.to(self.exponents.device)
        return self

    def forward(self, positions: Tensor, like: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [s, b, 1, p] of positions [s, b], on the device of `like`."""
        if self.inverse_frequencies.device != like.device:
            self.inverse_frequencies = self.inverse_frequencies.to(like.device)
        inverse = self.inverse_frequencies
        if self.exponents is not None:
            inverse = inverse * self.exponents.to(like.device).exp()
        freqs = positions.float()[:, :, None, None] * inverse
        if interleaved:
            freqs = freqs.repeat_interleave(2, dim=-1)
        else:
            freqs = torch.cat((freqs, freqs), dim=-1)
        cos, sin = cos_sin(freqs, torch.float32)
        return (cos * self.factor).to(like.dtype), (sin * self.factor).to(like.dtype)


@dataclass
class MLASelfAttentionSubmodules:
    """Parts of a multi-latent attention."""

    linear_q_proj: ModuleSpec | type | Any = None
    linear_q_down_proj: ModuleSpec | type | Any = None
    linear_q_up_proj: ModuleSpec | type | Any = None
    linear_gate_proj: ModuleSpec | type | Any = None
    linear_kv_down_proj: ModuleSpec | type | Any = None
    linear_kv_up_proj: ModuleSpec | type | Any = None
    core_attention: ModuleSpec | type | Any = None
    linear_group_proj: ModuleSpec | type | Any = None
    linear_proj: ModuleSpec | type | Any = None
    q_layernorm: ModuleSpec | type | Any = None
    kv_layernorm: ModuleSpec | type | Any = None


class MLASelfAttention(Attention):
    """Attention of a sequence to itself through latents; the rotary part has its own angles."""

    def build_projections(self, submodules: MLASelfAttentionSubmodules) -> None:
        """Build the projections down to the latents and up from them."""
        config, heads = self.config, self.config.num_attention_heads
        self.q_head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.output_width = heads * config.v_head_dim
        column = {"gather_output": False, "bias": False, "skip_bias_add": False}
        queries = heads * self.q_head_dim
        of_norms: dict[str, Any] = {
            "is_sharded": config.sequence_parallel,
            "eps": config.latent_norm_epsilon,
        }
        if config.q_lora_rank is None:
            self.linear_q_proj = self.linear(
                submodules.linear_q_proj, config.hidden_size, queries, **column
            )
        else:
            self.linear_q_down_proj = self.linear(
                submodules.linear_q_down_proj, config.hidden_size, config.q_lora_rank
            )
            self.q_layernorm = self.norm(submodules.q_layernorm, config.q_lora_rank, **of_norms)
            self.linear_q_up_proj = self.linear(
                submodules.linear_q_up_proj, config.q_lora_rank, queries, **column
            )
        if config.attention_output_gate:
            gates = self.output_width if config.mla_gate_by_channel else heads
            self.linear_gate_proj = self.linear(
                submodules.linear_gate_proj, config.hidden_size, gates, **column
            )
        latent = config.kv_lora_rank
        self.source = config.latent_source(self.layer_number)
        """Number of the layer whose latents keys and values are made from."""
        self.linear_kv_down_proj: Any = None
        if self.source == self.layer_number:
            self.linear_kv_down_proj = self.linear(
                submodules.linear_kv_down_proj,
                config.hidden_size,
                latent + config.qk_pos_emb_head_dim,
            )
            self.kv_layernorm = self.norm(submodules.kv_layernorm, latent, **of_norms)
        self.linear_kv_up_proj = self.linear(
            submodules.linear_kv_up_proj,
            latent,
            heads * (config.qk_head_dim + config.v_head_dim),
            **column,
        )
        inverse, factor, scale = _rotary_settings(config)
        self.uses_rotary = config.rotates_in(self.layer_number)
        has_exponents = config.rotary_exponents and self.uses_rotary
        self.rotary = LatentRotary(inverse, factor, has_exponents=has_exponents)
        self.softmax_scale = config.attention_scale(self.q_head_dim) * scale
        self.recomputes_up_projection = config.recomputes("mla_up_proj")
        self._dropped: CheckpointWithoutOutput | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        *others: object,
        keys_values: MutableMapping[object, tuple[Tensor, Tensor]] | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `Attention.forward`.

        Args:
            keys_values: number of a layer -> its latents [s/cp, b, c], normed, and its shared key
                [s/cp, b, p] before rotation ([s/cp/tp, ...] under sequence parallelism).
        """
        if keys_values is not None:
            if self.source == self.layer_number:
                config, down = self.config, self.linear_kv_down_proj
                with offloading(config.offloads("qkv_linear"), down):
                    joined, _ = down(hidden_states)
                widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
                latent, shared_key = joined.split(widths, -1)
                keys_values[self.source] = self.kv_layernorm(latent), shared_key
            key_value_states = torch.cat(keys_values[self.source], -1)
        given = (hidden_states, attention_mask, key_value_states, *others)
        return super().forward(*given, **options)  # type: ignore[arg-type]

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Project to this rank's heads and rotate.

        Args:
            hidden_states: [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).
            key_value_states: [..., c+p], normed latents and shared key; default the layer's own.
            positions: [s, b] in the sequence; default the positions of this rank's tokens.
        Returns:
            query and key [s/cp, b, n/tp, d+p], value [s/cp, b, n/tp, e], the tensors of
            `extra_core_inputs`, and with `config.attention_output_gate` the gate [s/cp, b, n/tp],
            or [s/cp, b, n/tp*e] with `config.mla_gate_by_channel`.
        """
        config, p = self.config, self.config.qk_pos_emb_head_dim
        down = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_down_proj
        joined, is_normed = key_value_states, key_value_states is not None
        downs = (down, self.linear_kv_down_proj or down)
        with offloading(config.offloads("qkv_linear"), *downs):
            of_query, _ = down(hidden_states)
            if joined is None:
                joined, _ = self.linear_kv_down_proj(hidden_states)
        latent, shared_key = joined.split([config.kv_lora_rank, p], -1)
        up = partial(self._project_up, positions, is_normed)
        extra = self.extra_core_inputs(hidden_states, of_query, positions)
        if config.attention_output_gate:
            extra = (*extra, self.linear_gate_proj(hidden_states)[0])
        if not (self.recomputes_up_projection and self.training):
            return *up(of_query, latent, shared_key), *extra
        self._dropped = CheckpointWithoutOutput()
        query, key, value = self._dropped.checkpoint(up, of_query, latent, shared_key)
        return query, key, value, *extra

    def extra_core_inputs(
        self, hidden_states: Tensor, of_query: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the inputs of the core attention in addition to query, key and value.

        Args:
            hidden_states: [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).
            of_query: as in `_project_up`.
        """
        return ()

    def query_key_row_factors(self, gamma: Tensor, alpha: float) -> list[tuple[Any, Tensor]]:
        """Scale heads by gamma [n]; all heads share the rotary key, so its query takes gamma."""
        config, by_head = self.config, gamma.unsqueeze(1)
        d, p, e = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        queries = torch.cat((by_head.pow(alpha).expand(-1, d), by_head.expand(-1, p)), 1)
        values = torch.ones_like(by_head).expand(-1, e)
        keys = torch.cat((by_head.pow(1 - alpha).expand(-1, d), values), 1)
        of_query = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        return [(of_query, queries.flatten()), (self.linear_kv_up_proj, keys.flatten())]

    def drop_query_key_value(self, attended: Tensor) -> None:
        """Free the projections up from the latents, if they are recomputed in backward."""
        if self._dropped is not None:
            self._dropped.discard_output_and_register_recompute(attended)
            self._dropped = None

    def _project_up(
        self,
        positions: Tensor | None,
        is_normed: bool,
        of_query: Tensor,
        latent: Tensor,
        shared_key: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value from the latents [s, b, c] and the shared key [s, b, p].

        Args:
            is_normed: whether the latents are normed already.
            of_query: the latent of the query; without `q_lora_rank` the query before rotation.
        """
        config, heads = self.config, self.num_attention_heads_per_partition
        d, p, e = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        query = of_query
        if config.q_lora_rank is not None:
            query, _ = self.linear_q_up_proj(self.q_layernorm(of_query))
        latent = latent if is_normed else self.kv_layernorm(latent)
        keys_and_values, _ = self.linear_kv_up_proj(latent)
        shared_key = self._for_all_heads(shared_key)

        s, b = query.shape[:2]
        query = query.view(s, b, heads, d + p)
        key, value = keys_and_values.view(s, b, heads, d + e).split([d, e], -1)
        if not self.uses_rotary:
            shared_key = shared_key.reshape(s, b, heads if shared_key.dim() > 3 else 1, p)
            shared_key = shared_key.expand(s, b, heads, p)
            return query, torch.cat((key, shared_key), -1), self._apart(value)
        if positions is None:
            positions = positions_of(s, query.device, self.pg_collection.microbatch_cp)
        cos, sin = self.rotary(positions, query, config.rope_interleave)
        asked = () if config.apply_rope_fusion else UNFUSED
        kernel = LATENT_ROTARY.choose(Request.of(query), asked).kernel
        if config.layout_invariant_mode:
            # The kernel sees each head as a sample, with its own copy of the shared key.
            cos, sin = (x.expand(-1, b, -1, -1).repeat_interleave(heads, 1) for x in (cos, sin))
            query, key = (x.reshape(s, b * heads, 1, -1) for x in (query, key))
            shared_key = shared_key.reshape(s, b * heads, p)
        query, key = kernel.run(query, key, shared_key, cos, sin, config.rope_interleave)
        query, key = (x.view(s, b, heads, d + p) for x in (query, key))
        return query, key, self._apart(value)

    def _apart(self, value: Tensor) -> Tensor:
        """Return values with storage of their own, which can be freed, if they are recomputed."""
        return value.contiguous() if self.recomputes_up_projection else value

    def _for_all_heads(self, shared_key: Tensor) -> Tensor:
        """Return the shared rotary key of all tokens [s, b, p], or in layout-invariant mode its
        copies for this rank's heads [s, b, n/tp, p]; its gradient is summed over heads."""
        tp, config = self.pg_collection.tp, self.config
        if config.layout_invariant_mode:
            if config.sequence_parallel:
                shared_key = gather_from_sequence_parallel_region(shared_key, False, tp)
            count = self.num_attention_heads_per_partition
            units = math.gcd(config.num_attention_heads, config.tensor_units) // tp.size()
            return copies(shared_key, 2, count, units, tp)
        if tp.size() == 1:
            return shared_key
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(shared_key, group=tp)
        return copy_to_tensor_model_parallel_region(shared_key, group=tp)


def latent_frequencies(config: TransformerConfig, base: float, *, is_stretched: bool) -> Tensor:
    """Return the inverse frequencies [p/2] of the rotary part; YaRN changes them if stretched."""
    channels = config.qk_pos_emb_head_dim
    if is_stretched and config.rope_type == "yarn":
        return yarn_of_config(channels, base, config)
    exponent = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    return 1.0 / (base**exponent)


def _rotary_settings(config: TransformerConfig) -> tuple[Tensor, float, float]:
    """Return inverse frequencies, the factor on cosine and sine, and the factor on the scores."""
    inverse = latent_frequencies(config, config.rotary_base, is_stretched=True)
    if config.rope_type == "rope":
        return inverse, 1.0, 1.0
    factor = config.rotary_scaling_factor
    # DeepSeek's form of YaRN's temperature: the factor of `mscale_all_dim` multiplies the scores of
    # the whole head; the rotary part is multiplied by the ratio of `mscale`'s factor to it.
    full = yarn_attention_factor(factor, config.mscale_all_dim)
    return inverse, yarn_attention_factor(factor, config.mscale) / full, full**2
