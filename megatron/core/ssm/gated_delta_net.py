"""Gated DeltaNet and Kimi Delta Attention: the state is one matrix per head, with the delta rule.

S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
arXiv 2412.06464, section 3.3, as in Qwen3-Next: several value heads share a query and a key head, a
short convolution precedes the rule, and a gated norm of each head follows it.

Kimi Delta Attention has a decay for each channel of a key. Kimi Team, "Kimi Linear: An Expressive,
Efficient Attention Architecture", section 3, arXiv 2510.26692. Decays and output gates are
projections of latents that all heads share and that are as wide as a value head, or of the tokens
(`linear_full_rank_gates`); the gate is a sigmoid.

Legend: s sequence, b micro batch, g key heads, n value heads, r = n/g, d width of a key head, e of
a value head, w width of a latent. A block is a key head: query d, key d, r values and r output
gates of e, r write strengths, r decays. A block of Kimi Delta Attention is query d, key d, r values
of e, r write strengths, and w/g features of the latents of decays and of gates (without latents r
decays of d, and r gates of e).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.chunks import DocumentRows
from megatron.core.kernels.delta_rules import DeltaChunks, delta_chunks, kimi_delta_chunks
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.recurrent_mixer import (
    RecurrentMixer,
    RecurrentMixerSubmodules,
    fill_log_decays,
    fill_step_biases,
    wide,
)
from megatron.core.tensor_parallel.linear_with_overlap import (
    InputMode,
    LinearCommSpec,
    parallel_linear,
)
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer, device_of_parameters
from megatron.core.transformer.norm import RMSNorm

GatedDeltaNetSubmodules = RecurrentMixerSubmodules
_UNIT_EPS = 1e-6


class GatedDeltaNet(RecurrentMixer):
    """Mix a sequence by the gated delta rule."""

    rule: ClassVar[Callable[..., DeltaChunks]] = staticmethod(delta_chunks)

    @staticmethod
    def sizes_of(config: Any) -> MixerSizes:
        g, n = config.linear_num_key_heads, config.linear_num_value_heads
        d, e, r = config.linear_key_head_dim, config.linear_value_head_dim, n // g
        return MixerSizes(
            num_blocks=g,
            num_heads=n,
            key_width=d,
            value_width=e,
            taps=config.linear_conv_kernel_dim,
            rows_of_block=(d, d, r * e, r * e, r, r),
            convolved=slice(0, 3),
            # Read by the key, erase, write, read by the query.
            state_products=4,
            vector_parameters=2 * n + e,
        )

    def add_parameters(self, layer: ParallelLayer) -> None:
        """Create the decays of the heads, and the norm that all heads share."""
        n = self.num_heads
        self.A_log = layer.new_parameter(n, split_dim=0, init_method=fill_log_decays)
        self.dt_bias = layer.new_parameter(n, split_dim=0, init_method=torch.nn.init.ones_)
        self.add_norm()

    def add_norm(self) -> None:
        """Create the norm of a head; all heads share its scales."""
        config = self.config
        self.out_norm = RMSNorm(
            self.sizes.value_width,
            config.linear_norm_epsilon or config.layernorm_epsilon,
            dtype=config.params_dtype,
            device=device_of_parameters(config),
            is_exact=config.layout_invariant_mode,
        )
        # Each tensor-parallel rank norms its own heads, with or without sequence parallelism.
        meta = get_param_meta(self.out_norm.weight)
        set_param_meta(self.out_norm.weight, replace(meta, partial_grad_axes=("tp",)))

    def state_shape(self) -> tuple[int, ...]:
        """Return (g/tp, r, d, e)."""
        r = self.num_heads // self.num_blocks
        return self.num_blocks, r, self.sizes.key_width, self.sizes.value_width

    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return log decays, at most 0, and write strengths: [s, b, n/tp] each."""
        _, strength, decay = (x.flatten(2) for x in others)
        steps = F.softplus(wide(decay) + wide(self.dt_bias))
        return -wide(self.A_log).exp() * steps, self.strength(strength)

    def strength(self, x: Tensor) -> Tensor:
        """Return the write strengths of projections [s, b, n/tp]."""
        return wide(x).sigmoid() * (2.0 if self.config.linear_allow_neg_eigval else 1.0)

    def recurrence(
        self,
        convolved: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        documents: DocumentRows | None,
    ) -> DeltaChunks:
        """Return the delta rule, with queries and keys [s, b, g, d] of length 1."""
        query, key, value = convolved
        value = value.reshape(*value.shape[:2], self.num_heads, -1)
        query = _unit(query) * self.sizes.key_width**-0.5
        return self.rule(query, _unit(key), value, *coefficients, documents)

    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Norm each head of [s, b, n, e], then gate it; return [s, b, n*e]."""
        gate = others[0]
        out = self.out_norm(out.to(gate.dtype))
        return (out * F.silu(wide(gate.reshape(out.shape)))).flatten(2)


def _unit(x: Tensor) -> Tensor:
    """Return x [..., d] with length 1."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)


class KimiDeltaAttention(GatedDeltaNet):
    """Mix a sequence by the delta rule with a decay for each channel."""

    rule = staticmethod(kimi_delta_chunks)

    @staticmethod
    def sizes_of(config: Any) -> MixerSizes:
        """Return the sizes; the width of a latent is rounded up to a multiple of the key heads."""
        sizes = GatedDeltaNet.sizes_of(config)
        g, n, d, e = sizes.num_blocks, sizes.num_heads, sizes.key_width, sizes.value_width
        r, share = n // g, -(-e // g)
        if config.linear_full_rank_gates:
            rows = (d, d, r * e, r, r * d, r * e)
            return replace(sizes, rows_of_block=rows, vector_parameters=n + n * d + e)
        return replace(
            sizes,
            rows_of_block=(d, d, r * e, r, share, share),
            vector_parameters=n + n * d + e,
            inner_matrices=share * g * n * (d + e),
        )

    def add_parameters(self, layer: ParallelLayer) -> None:
        """Create the decays of heads, biases of channels, projections of latents, and the norm."""
        n, config = self.num_heads, self.config
        d, e, latent = self.sizes.key_width, self.sizes.value_width, self.latent_width
        self.units = layer.units(0, 1)
        self.decay_up_weight = self.gate_up_weight = None
        self.A_log = layer.new_parameter(n, split_dim=0, init_method=fill_log_decays)
        self.dt_bias = layer.new_parameter(n * d, split_dim=0, init_method=fill_step_biases)
        if not config.linear_full_rank_gates:
            self.decay_up_weight, self.gate_up_weight = (
                layer.new_parameter(rows, latent, split_dim=0, init_method=config.init_method)
                for rows in (n * d, n * e)
            )
        self.add_norm()

    @property
    def latent_width(self) -> int:
        """Width of a latent."""
        return self.sizes.num_blocks * self.sizes.rows_of_block[-1]

    def mix_in_units(
        self, packed: Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> Tensor:
        """Mix [s, b, features] to [s, b, n/tp * e]; all blocks share the latents, so units need
        their products before."""
        if self.units is None or self.decay_up_weight is None or self.gate_up_weight is None:
            return super().mix_in_units(packed, packed_seq_params)
        rows, r = self.sizes.rows_of_block, self.num_heads // self.num_blocks
        of_blocks = packed.unflatten(2, (self.num_blocks, -1))
        *parts, of_decay, of_gate = of_blocks.split(rows, -1)
        for share, weight in ((of_decay, self.decay_up_weight), (of_gate, self.gate_up_weight)):
            parts.append(self._from_latent_in_units(share, weight).view(*share.shape[:3], -1))
        mixer = copy.copy(self)
        mixer._parameters = self._parameters | {"decay_up_weight": None, "gate_up_weight": None}
        widths = r * self.sizes.key_width, r * self.sizes.value_width
        mixer.sizes = replace(self.sizes, rows_of_block=(*rows[:-2], *widths))
        return mixer.mix_in_units(torch.cat(parts, -1).flatten(2), packed_seq_params)

    def _from_latent_in_units(self, share: Tensor, weight: Tensor) -> Tensor:
        tp = self.pg_collection.tp
        latent = gather_from_tensor_model_parallel_region(share.flatten(2).contiguous(), group=tp)
        spec = LinearCommSpec(tp, input_mode=InputMode.REPLICATED, units=self.units)
        return parallel_linear(latent, weight, None, spec)

    def from_latent(self, share: Tensor, weight: Tensor | None) -> Tensor:
        """Return latents times a matrix, fp32 or wider; `share` itself without a matrix.

        Args:
            share: [s, b, g/tp, w/g], this rank's features of the latent.
            weight: [m/tp, w].
        Returns:
            [s, b, m/tp].
        Communication:
            forward all-gather of the latent, backward reduce-scatter, on `tp`.
        """
        if weight is None:
            return wide(share.flatten(2))
        latent = all_gather_last_dim_from_tensor_parallel_region(
            share.flatten(2).contiguous(), group=self.pg_collection.tp
        )
        return wide(F.linear(latent, weight.to(latent.dtype)))

    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return log decays [s, b, n/tp, d], at most 0, and write strengths [s, b, n/tp]."""
        strength, of_decay, _ = others
        steps = self.from_latent(of_decay, self.decay_up_weight) + wide(self.dt_bias)
        steps = steps.unflatten(2, (self.num_heads, -1))
        rate, bound = wide(self.A_log).exp().unsqueeze(-1), self.config.linear_decay_bound
        decays = -rate * F.softplus(steps) if bound is None else bound * (rate * steps).sigmoid()
        return decays, self.strength(strength.flatten(2))

    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Norm each head of [s, b, n, e], then gate it; return [s, b, n*e]."""
        gate = self.from_latent(others[2], self.gate_up_weight).sigmoid()
        return self.out_norm(out.to(others[2].dtype)).flatten(2) * gate
