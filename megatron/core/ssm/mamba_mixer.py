"""Mamba-2: the state of a head decays by one factor per token, and each token adds to it.

T. Dao, A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality", section 7 (the Mamba-2 architecture), arXiv 2405.21060: one input
projection, a short convolution of X, B and C, a skip D of each head, and a gated norm of each
group.

Legend: s sequence, b micro batch, g groups, n heads, r = n/g, d width of the state, e of a head. A
block is a group: gates z and inputs x of r heads, B and C of d, r step sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.kernels.chunks import DocumentRows
from megatron.core.kernels.state_space_dual import StateSpaceChunks, state_space_chunks
from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.recurrent_mixer import (
    RecurrentMixer,
    RecurrentMixerSubmodules,
    fill_log_decays,
    fill_step_biases,
    wide,
)
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer

MambaMixerSubmodules = RecurrentMixerSubmodules


class MambaMixer(RecurrentMixer):
    """Mix a sequence by a state space with one decay for each head and token."""

    has_convolution_bias = True

    @staticmethod
    def sizes_of(config: Any) -> MixerSizes:
        g, n = config.mamba_num_groups, config.mamba_num_heads
        d, e = config.mamba_state_dim, config.mamba_head_dim
        r = n // g
        channels = n * e + 2 * g * d
        return MixerSizes(
            num_blocks=g,
            num_heads=n,
            key_width=d,
            value_width=e,
            taps=config.linear_conv_kernel_dim,
            rows_of_block=(r * e, r * e, d, d, r),
            convolved=slice(1, 4),
            # Decay, write, read.
            state_products=3,
            vector_parameters=channels + 3 * n + config.mamba_gated_norm * n * e,
        )

    def add_parameters(self, layer: ParallelLayer) -> None:
        """Create the decays, step sizes and skips of the heads, and the scales of the norm."""
        n = self.num_heads
        self.A_log = layer.new_parameter(n, split_dim=0, init_method=fill_log_decays)
        self.dt_bias = layer.new_parameter(n, split_dim=0, init_method=fill_step_biases)
        self.D = layer.new_parameter(n, split_dim=0, init_method=nn.init.ones_)
        if self.config.mamba_gated_norm:
            self.norm_weight = layer.new_parameter(
                n * self.sizes.value_width, split_dim=0, init_method=nn.init.ones_
            )

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Mix the sequence, with the factors of `config.mamba_factors`; see `RecurrentMixer`."""
        if self.config.mamba_factors is None:
            return super().forward(hidden_states, **options)
        first, *_, last = self.config.mamba_factors
        output, _ = super().forward(hidden_states * first, **options)
        return output * last, None

    def _mix(self, packed: Tensor, *others: Any) -> Tensor:
        if self.config.mamba_factors is None:
            return super()._mix(packed, *others)
        rows = zip(self.sizes.rows_of_block, self.config.mamba_factors[1:-1], strict=True)
        factors = torch.cat([packed.new_full((count,), factor) for count, factor in rows])
        scaled = packed.unflatten(-1, (self.num_blocks, -1)) * factors
        return super()._mix(scaled.flatten(-2), *others)

    def state_shape(self) -> tuple[int, ...]:
        """Return (g/tp, d, r, e)."""
        r = self.num_heads // self.num_blocks
        return self.num_blocks, self.sizes.key_width, r, self.sizes.value_width

    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return log decays, at most 0, and step sizes: [s, b, n/tp] each."""
        steps = F.softplus(wide(others[1].flatten(2)) + wide(self.dt_bias))
        steps = steps.clamp(*self.config.mamba_step_limits)
        return -wide(self.A_log).exp() * steps, steps

    def recurrence(
        self,
        convolved: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        documents: DocumentRows | None,
    ) -> StateSpaceChunks:
        """Return the recurrence of inputs x [s, b, g, r*e] times their step sizes [s, b, n]."""
        x, key, query = convolved
        log_decay, steps = coefficients
        value = x.reshape(*x.shape[:2], self.num_heads, -1) * steps.unsqueeze(-1)
        return state_space_chunks(query, key, value, log_decay, documents)

    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Add the skip to [s, b, n, e], gate, then norm each group; return [s, b, n*e]."""
        x = convolved[0].reshape(out.shape)
        out = (out + wide(self.D).unsqueeze(-1) * x).flatten(2)
        gate = others[0]
        gated = out.view(gate.shape) * F.silu(wide(gate))
        if not self.config.mamba_gated_norm:
            return gated.flatten(2)
        scale = gated.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon
        return (gated * scale.rsqrt()).flatten(2) * wide(self.norm_weight)
